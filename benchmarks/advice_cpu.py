"""The planner's ranking of meshes against measured train steps, on virtual CPU devices with measured rates.

    python benchmarks/advice_cpu.py --devices 4 --seq 4096

First the rates of this machine are measured as the planner wants them, with all devices at work, since they share
the cores: products, attention forward and backward, copies in memory, and messages, which are copies too. Then the
planner ranks the meshes with these rates, and every one of them is compiled and run, in rounds in which each takes
one step.

What that shows is whether order and ratios are right where arithmetic, memory traffic and messages decide. What it
cannot show: that a device waits for a busier one (they share the cores: whoever waits leaves them to others), and
transfers that run under attention (there are none on a CPU). Strategies other than the ring are not in this version
and are left out; `strategies_cpu.py` has them. Ratios are medians over rounds of the ratio of two times of one round.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax.attention import ring_attention
from ringjax.config import Config, MeshConfig
from ringjax.parallel import make_mesh
from ringjax.planner import Chip, Link, Machine
from ringjax.planner.advice import Candidate, advise
from ringjax.training.programs import build_programs
from ringjax.training.state import initial_state

VOCAB = 320


def main() -> None:
    args = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"command: python {' '.join(sys.argv)}\n")
    chip = measured_chip(args.devices, args.rounds)
    print(
        f"measured, for each of {args.devices} devices: dense {chip.dense('float32') / 1e9:.1f} GFLOP/s, "
        f"attention {chip.attention('float32', False) / 1e9:.1f} forward and "
        f"{chip.attention('float32', True) / 1e9:.1f} backward, "
        f"memory {chip.memory_bandwidth / 1e9:.2f} GB/s, messages {chip.link.bandwidth / 1e9:.2f} GB/s after "
        f"{chip.link.latency * 1e6:.0f} us\n"
    )
    config = settings(args)
    advice = advise(config, VOCAB, Machine("this machine", chip, args.devices, 1))
    candidates = [one for one in advice.ranked if one.strategy.runs][: args.most]
    times = measure([step(config, one) for one in candidates], args.rounds)
    behind = times_the_best(times)
    print(f"{'mesh':28} {'planned s':>10} {'measured s':>11} {'x best measured':>16}")
    for one, mine, ratio in zip(candidates, times, behind, strict=True):
        print(f"{one!s:28} {one.seconds:10.3f} {statistics.median(mine):11.3f} {ratio:16.2f}")
    print(f"\nthe advised mesh, {candidates[0]}, takes {behind[0]:.2f} x the best measured step")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="virtual devices")
    parser.add_argument("--seq", type=int, default=4096, help="sequence length")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=8, help="meshes that are measured, the first of the ranking")
    return parser.parse_args()


def settings(args: argparse.Namespace) -> Config:
    """The run that is planned and measured."""
    return Config.model_validate(
        {
            "model": {
                "layers": 2,
                "dim": args.dim,
                "heads": 4,
                "kv_heads": 2,
                "head_dim": 64,
                "mlp_dim": 3 * args.dim,
                "vocab_size": VOCAB,
            },
            "data": {"seq_len": args.seq, "batch": args.batch},
        }
    )


def measured_chip(devices: int, rounds: int) -> Chip:
    """This machine's rates, each device's share of them when all are at work."""
    mesh = jax.make_mesh((devices,), ("all",), (AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("all"))
    a = jax.device_put(jnp.ones((devices, 2048, 512), jnp.float32), place)
    b = jax.device_put(jnp.ones((devices, 512, 1024), jnp.float32), place)
    dense = timed(jax.jit(lambda a, b: a @ b), (a, b), rounds)
    q = jax.device_put(jnp.ones((devices, 2048, 4, 64), jnp.float32), place)
    k = jax.device_put(jnp.ones((devices, 2048, 2, 64), jnp.float32), place)
    rows = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), ("seq", "data"))

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return ring_attention(q, k, k, mesh=rows, batch_axes=("data",))

    forward = timed(jax.jit(attend), (q, k), rounds)
    both = timed(jax.jit(jax.grad(lambda q, k: attend(q, k).sum(), argnums=(0, 1))), (q, k), rounds)
    pairs = 4 * 64 * 2048**2 / 2  # heads times D times visible pairs
    x = jax.device_put(jnp.ones((devices, 2**22), jnp.float32), place)
    copied = timed(jax.jit(lambda x: x + 1), (x,), rounds)

    def send(x: jax.Array) -> jax.Array:
        ways = [(i, (i + 1) % devices) for i in range(devices)]
        return jax.lax.ppermute(x, "all", ways)

    shifted = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=place.spec, out_specs=place.spec))
    small = timed(shifted, (x[:, :16],), rounds)
    large = timed(shifted, (x,), rounds)
    link = Link("copies", 2**24 / max(large - small, 1e-9), small, source="measured")
    rate = 2 * 2048 * 512 * 1024 / dense
    return Chip(
        "cpu",
        "cpu",
        2**40,
        1,
        rate,
        rate,
        2 * 2**24 / copied,
        link,
        dense_rate=rate,
        attention_rate=4 * pairs / forward,
        attention_backward_rate=10 * pairs / max(both - forward, 1e-9),
    )


def timed(function: Callable, inputs: tuple, rounds: int) -> float:
    """Median seconds of a call."""
    jax.block_until_ready(function(*inputs))
    seconds = []
    for _ in range(max(rounds, 3)):
        start = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def step(config: Config, candidate: Candidate) -> Callable[[], object]:
    """A function that takes one train step on the candidate's mesh."""
    run = config.model_copy(update={"mesh": MeshConfig.model_validate(candidate.mesh)})
    mesh = make_mesh(run.mesh)
    with jax.set_mesh(mesh):
        programs = build_programs(run, VOCAB, mesh)
        places = jax.tree.map(lambda x: x.sharding, programs.state)
        state = jax.jit(lambda: initial_state(run, VOCAB, programs.optimizer), out_shardings=places)()
        rng = np.random.default_rng(0)
        batch: dict[str, Any] = {
            "tokens": rng.integers(0, 256, (run.data.batch, run.data.seq_len)),
            "positions": np.broadcast_to(np.arange(run.data.seq_len), (run.data.batch, run.data.seq_len)),
            "segment_ids": np.zeros((run.data.batch, run.data.seq_len)),
            "weights": np.ones((run.data.batch, run.data.seq_len)),
        }
        batch["targets"] = batch["tokens"]
        batch = {
            name: jax.device_put(batch[name].astype(leaf.dtype), leaf.sharding)
            for name, leaf in programs.batch.items()
        }
    holder = [state]

    def once() -> None:
        with jax.set_mesh(mesh):
            holder[0], metrics = programs.step(holder[0], batch)
            jax.block_until_ready((holder[0], metrics))

    return once


def measure(steps: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each in each round, which runs all of them; the first, unmeasured, compiles."""
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 1):
        for one, mine in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            one()
            if number:
                mine.append(time.perf_counter() - start)
    return seconds


def times_the_best(times: list[list[float]]) -> list[float]:
    """How many times as long each takes as the best: round by round, since the machine's mood changes meanwhile."""
    ahead = [statistics.median(a / b for a, b in zip(times[0], mine, strict=True)) for mine in times]
    return [max(ahead) / one for one in ahead]


if __name__ == "__main__":
    main()
