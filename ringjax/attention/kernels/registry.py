"""Which block kernel runs."""

import logging

from ringjax.attention.kernels.base import BlockKernel
from ringjax.attention.kernels.gpu import GpuKernel
from ringjax.attention.kernels.tpu import TpuKernel
from ringjax.attention.kernels.xla import XlaKernel

logger = logging.getLogger(__name__)

KERNELS: dict[str, BlockKernel] = {kernel.name: kernel for kernel in (XlaKernel(), TpuKernel(), GpuKernel())}
# The kernels that run on one kind of device only, and the best of each kind; elsewhere and everywhere: "xla".
PLATFORMS = {"tpu": "tpu", "gpu": "gpu"}


def get_kernel(kernel: str | BlockKernel, platform: str) -> BlockKernel:
    """Return the kernel of a name; "auto" is the best one for the devices; a kernel of one's own is itself.

    What "auto" takes is logged at level DEBUG, with the reason.

    Args:
      kernel: what is asked for.
      platform: of the devices, as jax calls it: "cpu", "gpu" or "tpu".

    Raises:
      ValueError: there is no such kernel, or it does not run on these devices.
    """
    if isinstance(kernel, BlockKernel):
        return kernel
    if kernel == "auto":
        return _best(platform)
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; the kernels are auto, {', '.join(KERNELS)}")
    needed = [where for where, name in PLATFORMS.items() if name == kernel]
    if needed and platform not in needed:
        raise ValueError(
            f"kernel {kernel!r} runs on {needed[0].upper()}s, and the devices here are {platform.upper()}s; use "
            "'auto', which takes the best one for them, or 'xla', which runs everywhere"
        )
    return KERNELS[kernel]


def _best(platform: str) -> BlockKernel:
    """What "auto" means on these devices."""
    name = PLATFORMS.get(platform, "xla")
    reason = "it is fused for them" if platform in PLATFORMS else "they have none of their own"
    logger.debug("attention kernel %s, since the devices are %ss: %s", name, platform.upper(), reason)
    return KERNELS[name]
