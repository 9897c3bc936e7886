"""What a run will need and how fast it can be: arithmetic and tables, no device."""

from ringjax.planner.custom import find_chip, load_chips
from ringjax.planner.flops import causal_keys, flops_per_token, keys_per_token, model_flops
from ringjax.planner.hardware import CHIPS, NETWORKS, Chip, Link
from ringjax.planner.machine import (
    Machine,
    TopologyError,
    across_hosts,
    machine_of,
    machine_of_topology,
    platform_problems,
    read_topology,
)
from ringjax.planner.short import short_form
from ringjax.planner.units import gib

__all__ = [
    "CHIPS",
    "NETWORKS",
    "Chip",
    "Link",
    "Machine",
    "TopologyError",
    "across_hosts",
    "causal_keys",
    "find_chip",
    "flops_per_token",
    "gib",
    "keys_per_token",
    "load_chips",
    "machine_of",
    "machine_of_topology",
    "model_flops",
    "platform_problems",
    "read_topology",
    "short_form",
]
