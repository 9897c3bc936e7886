"""How a model is spread over devices: the mesh and the one sharding table."""

from ringjax.parallel.mesh import AXES, MeshError, make_mesh, single_device_mesh, start_devices
from ringjax.parallel.sharding import activation_sharding, constrain, gather, state_shardings, stored, used

__all__ = [
    "AXES",
    "MeshError",
    "activation_sharding",
    "constrain",
    "gather",
    "make_mesh",
    "single_device_mesh",
    "start_devices",
    "state_shardings",
    "stored",
    "used",
]
