"""How a model is spread over devices: the mesh and the one sharding table."""

from ringjax.parallel.clusters import ProcessesError
from ringjax.parallel.collectives import Collective, read_collectives, traffic
from ringjax.parallel.mesh import (
    AXES,
    HOST_MEMORY,
    check_host_memory,
    make_mesh,
    single_device_mesh,
    start_devices,
)
from ringjax.parallel.pipeline import Schedule, run_pipeline
from ringjax.parallel.placement import MeshError
from ringjax.parallel.processes import start_processes
from ringjax.parallel.program_text import loop_trips
from ringjax.parallel.sharding import (
    STACKED,
    activation_sharding,
    constrain,
    device_count,
    gather,
    state_shardings,
    stored,
    used,
)

__all__ = [
    "AXES",
    "HOST_MEMORY",
    "STACKED",
    "Collective",
    "MeshError",
    "ProcessesError",
    "Schedule",
    "activation_sharding",
    "check_host_memory",
    "constrain",
    "device_count",
    "gather",
    "loop_trips",
    "make_mesh",
    "read_collectives",
    "run_pipeline",
    "single_device_mesh",
    "start_devices",
    "start_processes",
    "state_shardings",
    "stored",
    "traffic",
    "used",
]
