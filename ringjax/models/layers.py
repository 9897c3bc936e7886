"""The parts of a block that look at one token at a time: weights, RMSNorm, SwiGLU."""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from ringjax.parallel import constrain, device_count, gather


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str, ...], std: float) -> nnx.Param:
    """A float32 weight drawn from a normal distribution cut at two standard deviations.

    Args:
      rngs: source of randomness; its "params" stream is used.
      shape: size of each dim.
      dims: logical name of each dim, which decides where the weight is stored.
      std: standard deviation of what is drawn, after the cut.
    """
    uncut = std / 0.87962566103423978  # the standard deviation of a unit normal cut at -2 and 2
    return nnx.Param(uncut * jax.random.truncated_normal(rngs.params(), -2, 2, shape, jnp.float32), dims=dims)


def use(param: nnx.Param, dtype: jnp.dtype) -> jax.Array:
    """The value of a weight, cast and brought together on every device that needs it, right before use."""
    return gather(param[...].astype(dtype), *param.get_metadata("dims"))


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last dim, computed in float32.

    Args:
      dim: M.
      eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32), dims=("embed",))

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        x = x_BSM.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * use(self.scale, jnp.float32)).astype(x_BSM.dtype)


class SwiGLU(nnx.Module):
    """y = (silu(x gate) * (x up)) down (Shazeer, arXiv:2002.05202).

    Args:
      dim: M.
      mlp_dim: F.
      output_scale: factor on the initial size of the output projection.
      dtype: type of the computation.
      rngs: source of the initial weights.
      chunk: tokens of each device whose hidden values exist at one time; the backward pass computes them again.
        None = all tokens, and they are kept.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        output_scale: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        chunk: int | None = None,
    ):
        self.dtype = dtype
        self.chunk = chunk
        self.gate = normal_param(rngs, (dim, mlp_dim), ("embed", "mlp"), 1 / math.sqrt(dim))
        self.up = normal_param(rngs, (dim, mlp_dim), ("embed", "mlp"), 1 / math.sqrt(dim))
        self.down = normal_param(rngs, (mlp_dim, dim), ("mlp", "embed"), output_scale / math.sqrt(mlp_dim))

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        if self.chunk is not None:
            return self._in_chunks(x_BSM, self.chunk)
        gate_BSF = constrain(x_BSM @ use(self.gate, self.dtype), "batch", "seq", "mlp")
        up_BSF = constrain(x_BSM @ use(self.up, self.dtype), "batch", "seq", "mlp")
        return constrain((nnx.silu(gate_BSF) * up_BSF) @ use(self.down, self.dtype), "batch", "seq", "embed")

    def _in_chunks(self, x_BSM: jax.Array, chunk: int) -> jax.Array:
        """Each device runs over its own tokens. Letters as in loss.py: P, R pieces of batch and sequence."""
        P, R = device_count("batch"), device_count("seq")
        tokens = x_BSM.shape[0] * x_BSM.shape[1] // (P * R)
        count = math.ceil(tokens / chunk)
        size = math.ceil(tokens / count)
        x_PRLM = rearrange(x_BSM, "(P b) (R L) M -> P R (b L) M", P=P, R=R)
        x_PRLM = jnp.pad(x_PRLM, [(0, 0), (0, 0), (0, count * size - tokens), (0, 0)])
        x_QPRCM = rearrange(x_PRLM, "P R (Q C) M -> Q P R C M", Q=count)
        x_QPRCM = constrain(x_QPRCM, None, "batch", "seq", None, "embed")

        def copies(param: nnx.Param) -> jax.Array:
            """A weight of each device's own, in float32: its gradient adds up there, and is summed over them once."""
            weight = use(param, self.dtype).astype(jnp.float32)
            dims = [used_dim if used_dim != "embed" else None for used_dim in param.get_metadata("dims")]
            return constrain(jnp.broadcast_to(weight, (P, R, *weight.shape)), "batch", "seq", *dims)

        gate, up, down = map(copies, (self.gate, self.up, self.down))

        @jax.checkpoint
        def one(x_PRCM: jax.Array) -> jax.Array:
            def product(formula: str, x: jax.Array, weight: jax.Array, *dims: str | None) -> jax.Array:
                y = jnp.einsum(formula, x, weight.astype(self.dtype))
                return constrain(y, "batch", "seq", None, *dims)

            gate_PRCF = product("PRCM,PRMF->PRCF", x_PRCM, gate, "mlp")
            up_PRCF = product("PRCM,PRMF->PRCF", x_PRCM, up, "mlp")
            return product("PRCF,PRFM->PRCM", nnx.silu(gate_PRCF) * up_PRCF, down, "embed")

        y_PRLM = rearrange(jax.lax.map(one, x_QPRCM), "Q P R C M -> P R (Q C) M")[:, :, :tokens]
        y_BSM = rearrange(y_PRLM, "P R (b L) M -> (P b) (R L) M", L=x_BSM.shape[1] // R)
        return constrain(y_BSM, "batch", "seq", "embed")
