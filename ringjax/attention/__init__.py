"""Exact attention over a sequence sharded across a ring of devices. Needs jax and numpy only."""

from ringjax.attention.api import ring_attention
from ringjax.attention.layout import Layout, get_layout
from ringjax.attention.mask import Mask
from ringjax.attention.reference import reference_attention

__all__ = ["Layout", "Mask", "get_layout", "reference_attention", "ring_attention"]
