"""The parts of a block that look at one token at a time: weights, RMSNorm, SwiGLU."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ringjax.parallel import constrain, gather


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
    """

    def __init__(self, dim: int, mlp_dim: int, output_scale: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.dtype = dtype
        self.gate = normal_param(rngs, (dim, mlp_dim), ("embed", "mlp"), 1 / math.sqrt(dim))
        self.up = normal_param(rngs, (dim, mlp_dim), ("embed", "mlp"), 1 / math.sqrt(dim))
        self.down = normal_param(rngs, (mlp_dim, dim), ("mlp", "embed"), output_scale / math.sqrt(mlp_dim))

    def __call__(self, x_BSM: jax.Array) -> jax.Array:
        gate_BSF = constrain(x_BSM @ use(self.gate, self.dtype), "batch", "seq", "mlp")
        up_BSF = constrain(x_BSM @ use(self.up, self.dtype), "batch", "seq", "mlp")
        return constrain((nnx.silu(gate_BSF) * up_BSF) @ use(self.down, self.dtype), "batch", "seq", "embed")
