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
from ringjax.parallel.overlap import Hop, covered, read_hops
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
from ringjax.parallel.topology import Topology, TopologyError, get_topology

__all__ = [
    "AXES",
    "HOST_MEMORY",
    "STACKED",
    "Collective",
    "Hop",
    "MeshError",
    "ProcessesError",
    "Schedule",
    "Topology",
    "TopologyError",
    "activation_sharding",
    "check_host_memory",
    "constrain",
    "covered",
    "device_count",
    "gather",
    "get_topology",
    "loop_trips",
    "make_mesh",
    "read_collectives",
    "read_hops",
    "run_pipeline",
    "single_device_mesh",
    "start_devices",
    "start_processes",
    "state_shardings",
    "stored",
    "traffic",
    "used",
]
