"""What a run will need and how fast it can be: arithmetic and tables, no device."""

from ringjax.planner.custom import find_chip, load_chips
from ringjax.planner.flops import causal_keys, flops_per_token, keys_per_token
from ringjax.planner.hardware import CHIPS, NETWORKS, Chip, Link

__all__ = [
    "CHIPS",
    "NETWORKS",
    "Chip",
    "Link",
    "causal_keys",
    "find_chip",
    "flops_per_token",
    "keys_per_token",
    "load_chips",
]
