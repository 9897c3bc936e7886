"""Training: `run` for a whole run with its output, `Trainer` to step one from a program or a notebook."""

from ringjax.training.run import run
from ringjax.training.trainer import DivergedError, StepResult, Trainer

__all__ = ["DivergedError", "StepResult", "Trainer", "run"]
