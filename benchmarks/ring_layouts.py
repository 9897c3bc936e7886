"""Ring attention on virtual CPU devices beside dense attention on one: time and memory, in one run.

    python benchmarks/ring_layouts.py --seq 8192 --ring 4

The devices of a CPU share its cores, so a ring is no faster than one device here. What the ratios show is what the
ring costs on top of the same work (hops, merges), what the layouts skip, and what memory a device needs. Times are
the medians of rounds in which every contender runs once, so that a change of the machine's mood hits all alike.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax.attention import ring_attention
from ringjax.attention.layout import LAYOUTS


def main() -> None:
    args = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.ring)
    shape = (1, args.seq, args.heads, args.dim)
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3)]

    contenders: dict[str, tuple[int, Callable]] = {"dense, jax.nn.dot_product_attention": (1, dense)}
    contenders["ring of 1"] = (1, ring(1, "contiguous"))
    for layout in LAYOUTS:
        contenders[f"ring of {args.ring}, {layout}"] = (args.ring, ring(args.ring, layout))

    print(f"S = {args.seq}, H = {args.heads}, D = {args.dim}, float32, causal; {args.rounds} rounds")
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"command: python {' '.join(sys.argv)}\n")
    print(f"{'':40}  {'forward':>18}  {'forward + backward':>18}  {'temporary memory, a device':>26}")
    print(f"{'':40}  {'s':>8} {'x dense':>9}  {'s':>8} {'x dense':>9}  {'MB':>26}")
    programs = {name: build(function, devices, inputs) for name, (devices, function) in contenders.items()}
    times = measure(programs, args.rounds)
    base = times["dense, jax.nn.dot_product_attention"]
    for name, seconds in times.items():
        memory = programs[name][1][0].memory_analysis().temp_size_in_bytes / 1e6
        cells = "  ".join(f"{s:8.3f} {b / s:9.2f}" for s, b in zip(seconds, base, strict=True))
        print(f"{name:40}  {cells}  {memory:26.1f}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=8192, help="sequence length")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ring", type=int, default=4, help="virtual devices")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """All scores at once."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def ring(size: int, layout: str) -> Callable:
    """Ring attention over the first devices."""
    mesh = jax.make_mesh((size,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:size])
    return lambda q, k, v: ring_attention(q, k, v, mesh=mesh, layout=layout)


def build(function: Callable, devices: int, inputs: list[jax.Array]) -> list[tuple]:
    """Compiled forward and gradient, with their inputs in place."""
    mesh = jax.make_mesh((devices,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:devices])
    placed = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec(None, "seq")))
    gradient = jax.grad(lambda *x: function(*x).sum(), argnums=(0, 1, 2))
    return [(jax.jit(f).lower(*placed).compile(), placed) for f in (function, gradient)]


def measure(programs: dict[str, list[tuple]], rounds: int) -> dict[str, list[float]]:
    """Median seconds of each program, every round running all of them."""
    seconds = {name: [[] for _ in pair] for name, pair in programs.items()}
    for _ in range(rounds + 1):
        for name, pair in programs.items():
            for index, (program, inputs) in enumerate(pair):
                start = time.perf_counter()
                jax.block_until_ready(program(*inputs))
                seconds[name][index].append(time.perf_counter() - start)
    return {name: [statistics.median(times[1:]) for times in pair] for name, pair in seconds.items()}


if __name__ == "__main__":
    main()
