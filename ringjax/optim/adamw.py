"""From settings to an optax transformation."""

from typing import Any

import jax
import optax
from flax import nnx

from ringjax.config import OptimConfig
from ringjax.parallel import STACKED


def build_optimizer(config: OptimConfig, steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with a global gradient norm, warm-up and cosine decay.

    Gradients are scaled down to `clip_norm` together, moments are kept in float32, and the decoupled weight decay
    (Loshchilov and Hutter, arXiv:1711.05101) moves matrices only.

    Args:
      config: the settings of the optimizer.
      steps: optimizer steps of the whole run; the last one has learning rate `lr * final_lr_ratio`.

    Returns:
      The transformation, for parameters that are `nnx.Param` with dims, and the learning rate as a function of the
      number of steps already taken.

    Example:
      >>> optimizer, schedule = build_optimizer(OptimConfig(lr=1e-3, warmup_steps=10), steps=100)
      >>> round(float(schedule(10)), 6)
      0.001
    """
    schedule = _schedule(config, steps)
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )
    if config.clip_norm is None:
        return adamw, schedule
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw), schedule


def _schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """lr (t + 1) / (W + 1) up to step W, then half a cosine down to the last step. No step has rate 0."""
    warmup = config.warmup_steps
    rise = optax.linear_schedule(config.lr / (warmup + 1), config.lr, max(warmup, 1))
    fall = optax.cosine_decay_schedule(config.lr, max(steps - 1 - warmup, 1), config.final_lr_ratio)
    return optax.join_schedules([rise, fall], [warmup])


def _decayed(params: Any) -> Any:
    """True for each parameter with at least two dims in one layer: not for norm scales, stacked or not."""
    return jax.tree.map(_is_matrix, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _is_matrix(param: nnx.Variable) -> bool:
    """Whether a parameter mixes dims. Those that stack layers do not count."""
    return len([dim for dim in param.get_metadata("dims") if dim not in STACKED]) > 1
