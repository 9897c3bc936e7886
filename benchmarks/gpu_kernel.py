"""The block kernel on an NVIDIA GPU beside cuDNN's own attention, in one run. One command, under five minutes:

    python benchmarks/gpu_kernel.py

Causal and full, D = 128, bfloat16, L = 8192 and 32768, H = 32 over K = 8, one GPU, a ring of one: what is measured is
ringjax's kernels and nothing of the ring: "gpu", written in Pallas, and "cudnn", cuDNN behind the interface of
block kernels, with what that costs. cuDNN itself runs through `jax.nn.dot_product_attention(implementation="cudnn")`,
which repeats nothing for grouped queries either. Contenders take turns; a figure is the median of the rounds, a
ratio is of medians. Errors are relative Frobenius norms against the portable kernel in float32, on the first 2048
tokens.

FLOPs count 4 L^2 H D forward, 3.5 times that with the backward pass, and half of it if causal.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ringjax.attention import Mask, ring_attention

HEADS, KV_HEADS, DIM = 32, 8, 128
BARS = (0.9, 0.85)


def ours(causal: bool, kernel: str) -> Callable[..., jax.Array]:
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    return lambda q, k, v: ring_attention(q, k, v, mesh=mesh, mask=Mask(causal=causal), kernel=kernel)


def cudnn(causal: bool) -> Callable[..., jax.Array]:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def programs(attend: Callable[..., jax.Array]) -> tuple[Callable, Callable]:
    """Forward, and forward with backward."""

    def both(q, k, v, dout):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    return jax.jit(lambda q, k, v, dout: attend(q, k, v)), jax.jit(both)


def inputs(length: int, dtype: jnp.dtype) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [
        jax.random.normal(key, (1, length, n, DIM), jnp.float32).astype(dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def seconds(program: Callable, arrays: list[jax.Array], repeat: int) -> float:
    started = time.perf_counter()
    result = None
    for _ in range(repeat):
        result = program(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / repeat


def medians(
    attends: list[Callable], arrays: list[jax.Array], flops: float, rounds: int
) -> dict[tuple[int, int], float]:
    """Seconds of each contender's forward (0) and forward with backward (1)."""
    contenders, repeat = [programs(attend) for attend in attends], max(1, round(2e14 / flops))
    times: dict[tuple[int, int], list[float]] = {}
    for at in range(rounds + 1):  # the first one compiles
        for which, pair in enumerate(contenders):
            for what, program in enumerate(pair):
                spent = seconds(program, arrays, repeat if at else 1)
                if at:
                    times.setdefault((which, what), []).append(spent)
    return {key: statistics.median(some) for key, some in times.items()}


def error(causal: bool, attend: Callable[..., jax.Array]) -> float:
    """The largest of out and the gradients."""
    exact = programs(ours(causal, "xla"))[1](*(x.astype(jnp.float32) for x in inputs(2048, jnp.dtype("bfloat16"))))
    found = programs(attend)[1](*inputs(2048, jnp.dtype("bfloat16")))
    return max(
        float(jnp.linalg.norm((a - b.astype(jnp.float32)).ravel()) / jnp.linalg.norm(a.ravel()))
        for a, b in zip(exact, found, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    rounds, lengths = (args := parser.parse_args()).rounds, args.lengths
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"this measures a GPU's kernel, and jax finds a {device.platform.upper()}: run it on a GPU")
    print(f"{time.strftime('%Y-%m-%d')}, {device.device_kind}, jax {jax.__version__}")
    print("command: python benchmarks/gpu_kernel.py", f"--rounds {rounds}\n")
    print(f"{'':32}{'forward':^20}{'forward + backward':^20}")
    print(f"{'':32}" + 2 * f"{'TFLOP/s':>10}{'ratio':>8}  " + f"{'error':>8}")
    for length in lengths:
        for causal in (False, True):
            attends = {"cuDNN itself": cudnn(causal), "gpu": ours(causal, "gpu"), "cudnn": ours(causal, "cudnn")}
            flops = 4 * length**2 * HEADS * DIM / (2 if causal else 1)
            spent = medians(list(attends.values()), inputs(length, jnp.dtype("bfloat16")), flops, rounds)
            for which, (name, attend) in enumerate(attends.items()):
                row = f"L {length:<7}{'causal' if causal else 'full':<8}{name:<15}"
                for what, factor in enumerate((1, 3.5)):
                    mine = spent[which, what]
                    row += f"{factor * flops / mine / 1e12:>10.0f}{spent[0, what] / mine:>8.2f}  "
                print(row + f"{error(causal, attend):>8.4f}", flush=True)
    print(f"\nbars for gpu: ratio at least {BARS[0]} forward, {BARS[1]} forward + backward")


if __name__ == "__main__":
    main()
