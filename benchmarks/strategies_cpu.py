"""The planner's choice of strategy against measured attention, on virtual CPU devices with measured rates.

    python benchmarks/strategies_cpu.py --devices 4

Ring, all-gather, Ulysses and hybrids: each is built here from the operator and jax's collectives, checked against one
device, and timed forward + backward in rounds. The planner is given the rates of this machine (see `advice_cpu.py`)
and predicts the same: attention, merges and messages of one layer. For every shape the figure is how much longer the
strategy that it puts first takes than the fastest one.

The devices share the cores, and messages are copies in memory: what is seen is whether arithmetic and traffic are
counted right for each strategy. Nothing hides under anything, and nobody waits for a busier device.
"""

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import date

import jax
import jax.numpy as jnp
import numpy as np
from advice_cpu import measure, measured_chip, times_the_best
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax.attention import get_layout, ring_attention, ring_attention_shard
from ringjax.config import Config
from ringjax.planner import Machine
from ringjax.planner.estimate import estimate
from ringjax.planner.sizes import Sizes
from ringjax.planner.strategies import Strategy, strategies

VOCAB, DIM = 320, 64
HEADS = ((8, 8), (8, 4), (16, 2))  # query heads and key/value heads
LAYOUT = "zigzag"
Run = Callable[[], object]


def main() -> None:
    args = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"command: python {' '.join(sys.argv)}\n")
    chip = measured_chip(args.devices, args.rounds)
    machine = Machine("this machine", chip, args.devices, 1)
    print(f"S = {args.seq}, D = {DIM}, float32, causal, {LAYOUT}; forward + backward, {args.rounds} rounds\n")
    print(f"{'heads':10} {'strategy':14} {'planned s':>10} {'measured s':>11} {'x fastest':>10}")
    worst = 0.0
    for heads, kv_heads in HEADS:
        config = settings(args.devices, args.seq, heads, kv_heads)
        planned = sorted(
            (predicted(config, machine, one), str(one), one) for one in strategies(Sizes.of(config, VOCAB))
        )
        arrays = [
            np.random.default_rng(i).normal(size=(1, args.seq, n, DIM)).astype(np.float32)
            for i, n in enumerate((heads, kv_heads, kv_heads, heads))
        ]
        times = measure([built(one, args.devices, arrays) for _, _, one in planned], args.rounds)
        behind = times_the_best(times)
        for (seconds, name, _), mine, ratio in zip(planned, times, behind, strict=True):
            print(
                f"{f'{heads} / {kv_heads}':10} {name:14} {seconds:10.3f} {statistics.median(mine):11.3f} "
                f"{ratio:10.2f}",
                flush=True,
            )
        worst = max(worst, behind[0])
    print(f"\nthe strategy that is planned to be fastest takes at most {worst:.2f} x the fastest measured")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="virtual devices")
    parser.add_argument("--seq", type=int, default=4096, help="sequence length")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def settings(devices: int, seq: int, heads: int, kv_heads: int) -> Config:
    """A model of one layer, of whose step only attention is looked at."""
    model = {"layers": 1, "dim": 64, "heads": heads, "kv_heads": kv_heads, "head_dim": DIM, "mlp_dim": 64}
    return Config.model_validate(
        {
            "model": model | {"vocab_size": VOCAB},
            "data": {"seq_len": seq, "batch": 1},
            "mesh": {"seq": devices},
            "attention": {"layout": LAYOUT},
            "train": {"remat": "none"},
        }
    )


def predicted(config: Config, machine: Machine, strategy: Strategy) -> float:
    """Seconds of attention, forward + backward."""
    seconds = estimate(config, VOCAB, machine, strategy=strategy).seconds
    return seconds.attention + seconds.imbalance + seconds.merge + seconds.exchange


def built(strategy: Strategy, devices: int, natural: list[np.ndarray]) -> Run:
    """Forward + backward of a strategy, for q, k, v and the gradient of out in the sequence's order."""
    n = strategy.degree
    ring = devices // n
    mesh = jax.make_mesh((ring, n, 1), ("ring", "exchange", "alone"), (AxisType.Auto,) * 3)
    spec = PartitionSpec(None, ("ring", "exchange"))
    attend = gathered(ring) if strategy.name == "all-gather" else exchanged(n)
    operator = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    order = get_layout(LAYOUT)
    x = [jax.device_put(order.permute(x, ring), NamedSharding(mesh, spec)) for x in natural]
    both = jax.jit(lambda q, k, v, dout: jax.vjp(operator, q, k, v)[1](dout))
    agree([order.unpermute(np.asarray(x), ring) for x in both(*x)], natural)
    return lambda: jax.block_until_ready(both(*x))


def gathered(ring: int) -> Callable[..., jax.Array]:
    """Every device gets all keys and values."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        length, rank = q.shape[1], jax.lax.axis_index("ring")
        k, v = (jax.lax.all_gather(x, "ring", axis=1, tiled=True) for x in (k, v))
        place = get_layout(LAYOUT).block_positions
        whole = jnp.concatenate([place(jnp.int32(i), ring, length, jnp) for i in range(ring)])
        own = place(rank, ring, length, jnp)
        return ring_attention_shard(
            q, k, v, seq_axis="alone", batch_axes=None, head_axis=None, positions=own[None], kv_positions=whole[None]
        )

    return attend


def exchanged(degree: int) -> Callable[..., jax.Array]:
    """Tokens for heads among `degree` devices, and a ring of such groups."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if degree > 1:
            q, k, v = (jax.lax.all_to_all(x, "exchange", 2, 1, tiled=True) for x in (q, k, v))
        out = ring_attention_shard(q, k, v, seq_axis="ring", batch_axes=None, head_axis=None, layout=LAYOUT)
        return jax.lax.all_to_all(out, "exchange", 1, 2, tiled=True) if degree > 1 else out

    return attend


def agree(gradients: list[np.ndarray], natural: list[np.ndarray]) -> None:
    """Stop if a strategy does not compute what one device does."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("seq",))
    q, k, v, dout = natural
    expected = jax.jit(lambda *x: jax.vjp(lambda *x: ring_attention(*x, mesh=mesh), *x[:3])[1](x[3]))(q, k, v, dout)
    for mine, theirs in zip(gradients, expected, strict=True):
        error = np.linalg.norm(mine - np.asarray(theirs)) / np.linalg.norm(theirs)
        if error > 1e-5:
            raise SystemExit(f"a strategy differs from one device by {error:.1e}")


if __name__ == "__main__":
    main()
