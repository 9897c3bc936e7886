"""Products that devices execute in one step, whatever of it is model FLOPs: recomputed layers and hidden scores too.

A product of [m, k] and [k, n] is 2 m k n FLOPs.
"""

from dataclasses import dataclass

from ringjax.config import Config
from ringjax.planner.sizes import Sizes


@dataclass(frozen=True)
class LayerWork:
    """FLOPs of one run of one layer on one device, without attention's scores."""

    forward: float
    again: float
    backward: float


def layer_work(config: Config, size: Sizes) -> LayerWork:
    """Of the projections and the MLP.

    A block that is run again leaves the last product of the MLP out: no gradient needs its result. Without a loop
    over the layers the compiler also finds that the output projection has been made already.
    """
    tokens = size.rows * size.tokens
    mlp = size.dim * size.mlp_dim
    qkv = (size.heads + 2 * size.kv_heads) * size.head_dim * size.dim
    out = size.heads * size.head_dim * size.dim
    after = 2 * mlp + (out if config.train.scan_layers else 0)
    again = {"none": 0, "attention": after, "block": qkv + after, "full": qkv + out + 2 * mlp}
    weights = again[config.train.remat]
    if config.model.mlp_chunk is not None and config.train.remat == "none":
        weights = 2 * mlp
    forward = 2.0 * tokens * size.layer_matrices
    return LayerWork(forward, 2.0 * tokens * weights, 2 * forward)


def loss_work(size: Sizes) -> float:
    """FLOPs of the output head on one device: logits, again if they were made in chunks, and two gradients."""
    return (3 if size.loss_chunks == 1 else 4) * 2.0 * size.loss_tokens * size.head


def score_flops(config: Config, size: Sizes, pairs: float) -> float:
    """FLOPs of attention in one run of one layer on one device, forward, backward and where it is run again.

    Args:
      config: a run.
      size: of it.
      pairs: of a query and a key, of one head of one row, whose scores are computed.
    """
    products = 4 + 10 + (4 if config.train.remat == "full" else 0)
    return products * size.rows * size.heads * size.head_dim * pairs


def executed_flops(config: Config, vocab_size: int, pairs: float) -> float:
    """FLOPs of all products of one step on one device, `pairs` as in `score_flops`."""
    size = Sizes.of(config, vocab_size)
    layer = layer_work(config, size)
    runs = size.runs * (layer.forward + layer.again + layer.backward + score_flops(config, size, pairs))
    return config.optim.accumulate * (runs + loss_work(size))
