"""Which block kernel runs."""

import logging
from dataclasses import dataclass

import jax

from ringjax.attention.kernels.base import BlockKernel, Gradients, KernelError, Relation, Slots
from ringjax.attention.kernels.cpu import CpuKernel
from ringjax.attention.kernels.cudnn import CudnnKernel
from ringjax.attention.kernels.gpu import GpuKernel
from ringjax.attention.kernels.splash import SplashKernel
from ringjax.attention.kernels.tpu import TpuKernel
from ringjax.attention.kernels.xla import XlaKernel
from ringjax.attention.scores import ScoreRule
from ringjax.attention.softmax import Partial

logger = logging.getLogger(__name__)

KERNELS: dict[str, BlockKernel] = {
    kernel.name: kernel
    for kernel in (XlaKernel(), CpuKernel(), TpuKernel(), SplashKernel(), GpuKernel(), CudnnKernel())
}
# The kernels that run on one kind of device only; elsewhere and everywhere: "xla".
PLATFORMS = {"cpu": ("cpu",), "tpu": ("tpu", "splash"), "gpu": ("gpu", "cudnn")}


def get_kernel(kernel: str | BlockKernel, platform: str, kind: str = "", whole: bool = False) -> BlockKernel:
    """Return the kernel of a name; "auto" is the best one for the devices; a kernel of one's own is itself.

    What "auto" takes is logged at level DEBUG, with the reason. A kernel that is named does what is asked or refuses.

    Args:
      kernel: what is asked for.
      platform: of the devices, as jax calls it: "cpu", "gpu" or "tpu".
      kind: of the devices, as jax calls it, such as "TPU v5"; "" = any.
      whole: one call of the kernel gives the whole result, as in a ring of one.

    Raises:
      KernelError: there is no such kernel, or it does not run on these devices.
    """
    if isinstance(kernel, BlockKernel):
        return kernel
    if not isinstance(kernel, str):
        raise KernelError(f"a kernel is given by its name or is a BlockKernel; got {type(kernel).__name__}")
    if kernel == "auto":
        return _best(platform, kind, whole)
    if kernel not in KERNELS:
        raise KernelError(f"unknown kernel {kernel!r}; the kernels are auto, {', '.join(KERNELS)}")
    needed = [where for where, names in PLATFORMS.items() if kernel in names]
    if needed and platform not in needed:
        raise KernelError(
            f"kernel {kernel!r} runs on {needed[0].upper()}s, and the devices here are {platform.upper()}s; use "
            "'auto', which takes the best one for them, or 'xla', which runs everywhere"
        )
    if kernel == "tpu":
        return TpuKernel.of(kind)
    return CpuKernel(by_head=not whole) if kernel == "cpu" else KERNELS[kernel]


def _best(platform: str, kind: str, whole: bool) -> BlockKernel:
    """What "auto" means on these devices: the first kernel here that does not refuse.

    In a ring, ringjax's own, which give float32 and add into what is there. The libraries' kernels do not:

    - cuDNN rounds what each call gives to the inputs' dtype. An exact kernel rounded so, hop by hop, makes the
      gradients in bfloat16 err up to 2.2 times as much as on one device (dk, structured inputs, zigzag, a ring of 8;
      random inputs up to 1.4 times), where 1.25 is allowed.
    - Splash has to be given float32 to avoid that, its log-sum-exp comes in 128 copies, and the merge reads and
      writes the result once more in every step: compiled for v5e, the forward lap of a ring of 4 takes 455 MB beside
      its inputs and results, and with "tpu" 135 MB (H = 32, K = 8, D = 64, L = 8192). With D = 128 its scale is not
      exact at all. "tpu" does all that it does, in less; Splash runs where it is named, as another opinion.

    Where one call gives the whole result, as in a ring of one, there is nothing to merge and its rounding is the
    operator's own: there cuDNN comes first, by which the speed of others on these GPUs is measured.
    """
    missing = None
    if platform == "tpu":
        kernels = (TpuKernel.of(kind),)
    elif platform == "gpu":
        kernels = (CudnnKernel(), GpuKernel()) if whole else (GpuKernel(),)
    elif platform == "cpu":
        missing = CpuKernel().missing
        kernels = (XlaKernel() if missing else CpuKernel(by_head=not whole),)
    else:
        kernels = (XlaKernel(),)
    if platform not in PLATFORMS:
        reason = "they have none of their own"
    elif missing:
        reason = f"the one for them cannot run here, {missing}"
    else:
        reason = "it is the vendor's, for whole results" if len(kernels) > 1 else "it is fused for them"
    logger.debug("attention kernel %s, since the devices are %ss: %s", kernels[0].name, platform.upper(), reason)
    return kernels[0] if len(kernels) == 1 else FirstThatCan(kernels)


@dataclass(frozen=True)
class FirstThatCan(BlockKernel):
    """The first of some kernels that does not refuse a call.

    Attributes:
      kernels: the last one refuses nothing.
    """

    kernels: tuple[BlockKernel, ...]
    name = "auto"

    @property
    def check_vma(self) -> bool:
        return all(kernel.check_vma for kernel in self.kernels)

    def forward(self, q, kv, relation, rule, heads, before, q_slots, k_slots) -> Partial:
        kernel = self._chosen(q, kv, relation, rule, q_slots, k_slots)
        return kernel.forward(q, kv, relation, rule, heads, before, q_slots, k_slots)

    def backward(self, q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots) -> Gradients:
        kernel = self._chosen(q, kv, relation, rule, q_slots, k_slots)
        return kernel.backward(q, kv, relation, rule, heads, lse, delta, dout, before, q_slots, k_slots)

    def _chosen(
        self, q: jax.Array, kv: jax.Array, relation: Relation, rule: ScoreRule, q_slots: Slots, k_slots: Slots
    ) -> BlockKernel:
        some = q_slots.take(q, 3), k_slots.take(kv, 2)
        for kernel in self.kernels[:-1]:
            reason = kernel.refusal(*some, relation, rule)
            if reason is None:
                logger.debug("attention kernel %s for %d queries", kernel.name, q_slots.size)
                return kernel
            logger.debug("attention kernel %s not for %d queries: %s", kernel.name, q_slots.size, reason)
        return self.kernels[-1]
