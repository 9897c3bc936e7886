"""Attention of one block against one block: the interface and its implementations."""

from ringjax.attention.kernels.base import (
    BlockKernel,
    Gradients,
    KernelError,
    Lead,
    Order,
    Relation,
    Slots,
    all_slots,
)
from ringjax.attention.kernels.cpu import CpuKernel
from ringjax.attention.kernels.cudnn import CudnnKernel
from ringjax.attention.kernels.gpu import GpuKernel
from ringjax.attention.kernels.registry import get_kernel
from ringjax.attention.kernels.splash import SplashKernel
from ringjax.attention.kernels.tpu import TpuKernel
from ringjax.attention.kernels.xla import XlaKernel

__all__ = [
    "BlockKernel",
    "CpuKernel",
    "CudnnKernel",
    "GpuKernel",
    "Gradients",
    "KernelError",
    "Lead",
    "Order",
    "Relation",
    "Slots",
    "SplashKernel",
    "TpuKernel",
    "XlaKernel",
    "all_slots",
    "get_kernel",
]
