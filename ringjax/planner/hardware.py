"""The accelerators that ringjax knows, with the source of each number."""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator as jax sees it: a device.

    Attributes:
      name: as in the name of a topology.
      platform: of jax.
      memory: bytes that programs of one device can have.
      devices: that jax makes of one chip.
      source: of these numbers.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    memory: int
    devices: int
    source: str


_TPU = "https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, HBM of a chip"
_GPU = "target specifications of the XLA compiler, device_memory_size"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 32 * GIB, 1, _TPU),
        Chip("v5e", "tpu", 16 * GIB, 1, _TPU),
        Chip("v5p", "tpu", 95 * GIB, 1, _TPU),
        Chip("v6e", "tpu", 32 * GIB, 1, _TPU),
        Chip("tpu7x", "tpu", 96 * GIB, 2, f"{_TPU}: 192 GiB for the two devices of a chip"),
        Chip("a100", "gpu", 85_100_068_864, 1, _GPU),
        Chip("h100", "gpu", 84_942_979_072, 1, _GPU),
        Chip("h200", "gpu", 151_397_597_184, 1, _GPU),
        Chip("b200", "gpu", 191_514_411_008, 1, _GPU),
    )
}
