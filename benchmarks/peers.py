"""The operator beside other people's on a CPU: the PyPI package `ringattention`, and PyTorch on one device.

    pip install ringattention==0.1.2 --no-deps && pip install torch
    python benchmarks/peers.py ring
    python benchmarks/peers.py torch

`ring`: causal attention over 8 virtual devices that share the machine's cores, forward and forward + backward,
float32. The peer runs with several chunk sizes, and its fastest is the measure. Its package does not import on
current jax, so its module `ringattention_jax` is loaded by itself. It has one layout, contiguous; ringjax runs
contiguous and zigzag.

`torch`: one device, all cores, against `torch.nn.functional.scaled_dot_product_attention` (its CPU flash kernel),
full and causal, D = 64 and 128, float32 and bfloat16. Both get their inputs in the order they like best, [B, H, S, D]
for torch and [B, S, H, D] here.

All contenders of a line run in one process, in turn, in rounds, so that a change of the machine's mood hits all
alike; the figure is the median over rounds of the ratio of two times of one round, above 1 where ringjax is faster.
Results are compared before anything is timed. On a machine that others use at the same time the clock says how often
one was let in; `--cpu-time` counts the seconds that the cores spent on this process instead, and takes as time what
its two threads would need for them.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax.attention import Mask, get_layout, ring_attention

RING_DEVICES = 8
RING_BAR, TORCH_BARS = 2.5, {"float32": (1.1, 0.9), "bfloat16": (0.5, 0.5)}
Run = Callable[[], Any]
Clock = Callable[[], float]


def main() -> None:
    args = arguments()
    clock = cpu_clock if args.cpu_time else time.perf_counter
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RING_DEVICES if args.peer == "ring" else 1)
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"command: python {' '.join(sys.argv)}\n")
    if args.peer == "ring":
        against_ringattention(args.seq or 8192, args.rounds, clock)
    else:
        against_torch(args.seq or 4096, args.rounds, clock)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("ring", "torch"))
    parser.add_argument("--seq", type=int, help="sequence length: 8192 beside ringattention, 4096 beside torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="count the cores' seconds instead of the clock's")
    return parser.parse_args()


def against_ringattention(seq: int, rounds: int, clock: Clock) -> None:
    """H = 4, D = 64, float32, causal."""
    mesh = jax.make_mesh((RING_DEVICES,), ("seq",), (AxisType.Auto,))
    spec = PartitionSpec(None, "seq")
    natural = [np.random.default_rng(i).normal(size=(1, seq, 4, 64)).astype(np.float32) for i in range(4)]
    place = partial(jax.device_put, device=NamedSharding(mesh, spec))
    inputs = [place(x) for x in natural]
    length = seq // RING_DEVICES

    print(f"S = {seq}, H = 4, D = 64, float32, causal, {RING_DEVICES} virtual devices; {rounds} rounds\n")
    chunks = [size for size in (128, 256, 512, 1024) if size <= length]
    peers = {
        f"ringattention 0.1.2, chunks of {size}": both(ringattention(mesh, spec, size), inputs) for size in chunks
    }
    ours = {}
    for layout in ("contiguous", "zigzag"):
        order = get_layout(layout)
        own = [place(order.permute(x, RING_DEVICES)) for x in natural]
        ours[f"ringjax, {layout}"] = both(partial(ring_attention, mesh=mesh, layout=layout), own)
        out = order.unpermute(np.asarray(ours[f"ringjax, {layout}"][0]()), RING_DEVICES)
        for theirs in peers.values():
            agree(out, theirs[0]())

    contenders = peers | ours
    columns = []
    for which in (0, 1):
        seconds = timed([runs[which] for runs in contenders.values()], rounds, clock)
        columns.append(dict(zip(contenders, seconds, strict=True)))
    fastest = [min(peers, key=lambda peer: statistics.median(column[peer])) for column in columns]
    print(f"{'':36}  {'forward':>24}  {'forward + backward':>24}")
    print(f"{'':36}  {'s':>8} {'fastest peer / s':>16}  {'s':>8} {'fastest peer / s':>16}")
    for name in contenders:
        cells = [
            (statistics.median(column[name]), ratio(column[peer], column[name]))
            for column, peer in zip(columns, fastest, strict=True)
        ]
        print(f"{name:36}  " + "  ".join(f"{s:8.3f} {times:16.2f}" for s, times in cells))
    print(f"\nbar: {RING_BAR} in both")


def ringattention(mesh, spec: PartitionSpec, chunk: int) -> Callable:
    """The peer's operator over global arrays."""
    options = {
        "causal_block_size": 1,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": jax.lax.Precision.HIGHEST,
        "prevent_cse": True,
    }
    operator = load_module("ringattention", "ringattention_jax.py").ring_attention

    def local(q, k, v):
        return operator(q, k, v, None, None, None, "seq", True, options)

    return jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)


def load_module(package: str, file: str) -> Any:
    """One module of a package whose __init__ does not run."""
    found = next((path for path in map(Path, sys.path) if (path / package / file).is_file()), None)
    if found is None:
        raise SystemExit(f"{package} is not installed: pip install {package}==0.1.2 --no-deps")
    spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), found / package / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def against_torch(seq: int, rounds: int, clock: Clock) -> None:
    """H = 8, one device."""
    import torch  # type: ignore[import-not-found]  # a dependency of this benchmark only

    torch.set_num_threads(os.cpu_count() or 1)
    heads = 8
    print(f"S = {seq}, H = {heads}; torch {torch.__version__}, {torch.get_num_threads()} threads; {rounds} rounds")
    print("GFLOP/s count 4 S^2 H D forward, 3.5 times that with the backward pass, and half of it if causal.\n")
    print(f"{'':22}  {'forward, GFLOP/s':>26}  {'forward + backward, GFLOP/s':>28}")
    print(f"{'':22}  {'torch':>7} {'ringjax':>8} {'ratio':>9}  {'torch':>9} {'ringjax':>8} {'ratio':>9}   bars")
    mesh = jax.make_mesh((1,), ("seq",), (AxisType.Auto,))
    for dim in (64, 128):
        natural = [np.random.default_rng(i).normal(size=(1, seq, heads, dim)).astype(np.float32) for i in range(4)]
        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                attend = partial(ring_attention, mesh=mesh, mask=Mask(causal=causal))
                ours = both(attend, [jnp.asarray(x, dtype) for x in natural])
                theirs = torchs(torch, natural, dtype, causal)
                agree(np.asarray(ours[0](), np.float32), theirs[0]().float().transpose(1, 2).numpy(), dtype)
                work = 4 * seq**2 * heads * dim * (0.5 if causal else 1) / 1e9
                cells = []
                for which, factor in ((0, 1), (1, 3.5)):
                    times = timed([theirs[which], ours[which]], rounds, clock)
                    cells.append((*(factor * work / statistics.median(t) for t in times), ratio(*times)))
                name = f"D {dim} {dtype} {'causal' if causal else 'full'}"
                (a, b, r), (c, d, s) = cells
                bars = " and ".join(map(str, TORCH_BARS[dtype]))
                print(f"{name:22}  {a:7.0f} {b:8.0f} {r:9.2f}  {c:9.0f} {d:8.0f} {s:9.2f}   {bars}", flush=True)


def torchs(torch: Any, natural: list[np.ndarray], dtype: str, causal: bool) -> tuple[Run, Run]:
    """PyTorch's forward, and forward with backward."""
    x = [torch.tensor(x).to(getattr(torch, dtype)).transpose(1, 2).contiguous() for x in natural]
    inputs, dout = [one.requires_grad_() for one in x[:3]], x[3]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)

    def forward():
        with torch.no_grad():
            return attend(*inputs)

    return forward, lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def both(attend: Callable, inputs: list[jax.Array]) -> tuple[Run, Run]:
    """Compiled forward, and forward with backward."""
    forward = jax.jit(attend)
    backward = jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout))
    return (
        lambda: jax.block_until_ready(forward(*inputs[:3])),
        lambda: jax.block_until_ready(backward(*inputs)),
    )


def agree(mine: Any, theirs: Any, dtype: str = "float32") -> None:
    """Stop if two contenders do not compute the same."""
    mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
    error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
    if error > {"float32": 1e-5, "bfloat16": 1e-2}[dtype]:
        raise SystemExit(f"the contenders differ by {error:.1e}: nothing to compare")


def ratio(base: list[float], times: list[float]) -> float:
    """How many times as fast as `base`, round by round; the median."""
    return statistics.median(a / b for a, b in zip(base, times, strict=True))


def cpu_clock() -> float:
    """Seconds that the cores have spent on this process, divided by their number."""
    return time.process_time() / (os.cpu_count() or 1)


def timed(runs: list[Run], rounds: int, clock: Clock) -> list[list[float]]:
    """Seconds of each contender in each round; each round has one run of all. The first, unmeasured, compiles."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, mine in zip(runs, times, strict=True):
            start = clock()
            run()
            if number:
                mine.append(clock() - start)
    return times


if __name__ == "__main__":
    main()
