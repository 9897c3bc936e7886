"""Rotary position embedding (Su et al., arXiv:2104.09864)."""

import jax
import jax.numpy as jnp


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position * theta^(-2i / D), i = 0 ... D/2 - 1.

    Args:
      positions: [B, S] int, the place of each token in its document. Any order: a sharded, permuted sequence
        passes the positions of its layout.
      head_dim: D, even.
      theta: base of the frequencies.

    Returns:
      Two arrays [B, S, D/2] float32.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None] * theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (x_i, x_{i + D/2}) by their angles: the half-split convention, as in Hugging Face Llama.

    Scores of rotated queries and keys depend on the distance of their positions only.

    Args:
      x: [B, S, heads, D].
      cos: [B, S, D/2] float32, from `rotary_angles`.
      sin: likewise.

    Returns:
      Like x; computed in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
