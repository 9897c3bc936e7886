"""How parameters move."""

from ringjax.optim.adamw import build_optimizer

__all__ = ["build_optimizer"]
