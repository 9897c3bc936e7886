"""Exact attention over a sequence sharded across a ring of devices. Needs jax and numpy only."""

from ringjax.attention.adapter import attention_fn
from ringjax.attention.api import ring_attention, ring_attention_shard
from ringjax.attention.layout import Layout, get_layout
from ringjax.attention.mask import Mask
from ringjax.attention.reference import reference_attention
from ringjax.attention.scores import alibi_slopes
from ringjax.attention.softmax import merge_attention

__all__ = [
    "Layout",
    "Mask",
    "alibi_slopes",
    "attention_fn",
    "get_layout",
    "merge_attention",
    "reference_attention",
    "ring_attention",
    "ring_attention_shard",
]
