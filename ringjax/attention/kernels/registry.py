"""Which block kernel runs."""

from ringjax.attention.kernels.base import BlockKernel
from ringjax.attention.kernels.xla import XlaKernel

KERNELS: dict[str, BlockKernel] = {kernel.name: kernel for kernel in (XlaKernel(),)}


def get_kernel(kernel: str | BlockKernel) -> BlockKernel:
    """Return the kernel of a name; "auto" is the best one for what is asked; a kernel of one's own is itself.

    Raises:
      ValueError: there is no such kernel.
    """
    if isinstance(kernel, BlockKernel):
        return kernel
    if kernel == "auto":
        return KERNELS["xla"]
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; the kernels are auto, {', '.join(KERNELS)}")
    return KERNELS[kernel]
