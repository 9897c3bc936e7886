"""What accelerators are: arithmetic and tables, no device."""

from ringjax.planner.hardware import CHIPS, Chip

__all__ = ["CHIPS", "Chip"]
