"""Prints, as JSON lines, what XLA says of the laps on rings of 2 to 64 devices; run by test_ring_program.py."""

import json
from itertools import product

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax.attention import ring_attention
from ringjax.attention.kernels import BlockKernel, XlaKernel, get_kernel

LENGTH = 512  # tokens on each device


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64)
    for ring, kernel in product((2, 3, 4, 5, 8, 64), (XlaKernel(q_tile=128, k_tile=128), get_kernel("cpu", "cpu"))):
        for what, compiled in laps(ring, kernel):
            plan, text = compiled.memory_analysis(), compiled.as_text()
            assert plan is not None
            assert text is not None
            row = {
                "what": what,
                "kernel": kernel.name,
                "ring": ring,
                "temporary_bytes": plan.temp_size_in_bytes,
                "characters": len(text),
                "hops": text.count("collective-permute("),
            }
            print(json.dumps(row), flush=True)


def laps(ring: int, kernel: BlockKernel) -> list[tuple[str, jax.stages.Compiled]]:
    """The forward lap, and the backward lap with the forward's residuals as input."""
    mesh = jax.make_mesh((ring,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:ring])
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))

    def spec(heads: int, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, LENGTH * ring, heads, dim), jnp.float32, sharding=sharding)

    def attend(q, k, v):
        return ring_attention(q, k, v, mesh=mesh, layout="zigzag", kernel=kernel)

    def backward(q, k, v, dout):
        return jax.vjp(attend, q, k, v)[1](dout)

    inputs = spec(4, 16), spec(2, 16), spec(2, 16)
    forward = jax.jit(attend, out_shardings=sharding).lower(*inputs).compile()
    both = jax.jit(backward, out_shardings=sharding).lower(*inputs, spec(4, 16)).compile()
    return [("forward", forward), ("backward", both)]


if __name__ == "__main__":
    main()
