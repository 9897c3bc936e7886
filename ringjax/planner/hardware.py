"""The accelerators that ringjax knows, with the source of each number.

Rates are those of one device of jax, in FLOP/s and bytes/s; a TPU7x chip is two devices and a v4 or v5p chip one.
What a kernel reaches of a peak is not in a data sheet: the shares below are assumptions, and measured rates, which
replace them, are what a plan should be made with. See `custom.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """What joins a device to its neighbours.

    Attributes:
      name: for people.
      bandwidth: bytes/s that one device sends to one neighbour.
      latency: seconds from the start of a message to its first byte.
      two_way: whether a second neighbour can be sent to at the same time at the same rate, as on a torus.
      source: of the numbers.
    """

    name: str
    bandwidth: float
    latency: float
    two_way: bool = False
    source: str = ""

    def ring_bandwidth(self, ways: Literal[1, 2] = 1) -> float:
        """Bytes/s of a hop: with two ways, half of a message goes round the ring each way.

        On a torus that doubles it. A switched link carries what it carries, to whomever.
        """
        return self.bandwidth * (2 if ways == 2 and self.two_way else 1)


@dataclass(frozen=True)
class Shares:
    """What programs reach of the peak, 0 to 1: assumptions for machines on which nobody has measured.

    H100: 616 to 648 of 989 TFLOP/s forward (FlashAttention-3, arXiv:2407.08608, D = 128); dense layers of large
    models 0.6 to 0.75 of the peak in published training runs.
    """

    dense: float = 0.65
    attention: float = 0.6
    attention_backward: float = 0.5


@dataclass(frozen=True)
class Chip:
    """One accelerator as jax sees it: a device.

    Attributes:
      name: as in the name of a topology.
      platform: of jax.
      memory: bytes that programs of one device can have.
      devices: that jax makes of one chip.
      peak: FLOP/s of products in bfloat16, dense.
      peak_float32: likewise with float32 operands and nothing rounded.
      memory_bandwidth: bytes/s between a device and its memory.
      link: between devices of one host (GPUs) or one slice (TPUs).
      host: devices that `link` joins; None = all there are.
      network: between hosts, for one device; None = there is none.
      pod: devices of the largest slice; None = as many as one likes.
      shares: of the peaks that are reached.
      dense_rate, attention_rate, attention_backward_rate: FLOP/s measured in bfloat16, and the same share of the peak
        in float32; None = peak times share.
      sources: where each number is from, by attribute.
    """

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    memory: int
    devices: int
    peak: float
    peak_float32: float
    memory_bandwidth: float
    link: Link
    host: int | None = None
    network: Link | None = None
    pod: int | None = None
    shares: Shares = Shares()
    dense_rate: float | None = None
    attention_rate: float | None = None
    attention_backward_rate: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def dense(self, precision: str) -> float:
        """FLOP/s that products of dense layers reach, for train.precision."""
        return self._reached(self.dense_rate, self.shares.dense, precision)

    def attention(self, precision: str, backward: bool) -> float:
        """FLOP/s that a block of attention reaches."""
        measured = self.attention_backward_rate if backward else self.attention_rate
        share = self.shares.attention_backward if backward else self.shares.attention
        return self._reached(measured, share, precision)

    def peak_of(self, precision: str) -> float:
        """FLOP/s at most, for train.precision.

        Raises:
          ValueError: there is no such precision.
        """
        if precision not in ("bfloat16", "float32"):
            raise ValueError(f"precision must be bfloat16 or float32, got {precision!r}")
        return self.peak if precision == "bfloat16" else self.peak_float32

    def _reached(self, measured: float | None, share: float, precision: str) -> float:
        return (share if measured is None else measured / self.peak) * self.peak_of(precision)


# Nobody's data sheet: the order of magnitude of a small message, launch included.
_LATENCY = "latency: assumed, measure it"
_BOOK = "one-way rate of a link, https://jax-ml.github.io/scaling-book/tpus"
_ICI = {
    name: Link(f"{name} ICI, one link", rate, 1e-6, two_way=True, source=f"{_BOOK}; {_LATENCY}")
    for name, rate in {"v4": 45e9, "v5e": 45e9, "v5p": 90e9, "v6e": 90e9, "tpu7x": 100e9}.items()
}
_NVLINK = {
    name: Link(f"NVLink{version}", rate, 10e-6, source=f"{sheet}, half of the total of both ways; {_LATENCY}")
    for name, version, rate, sheet in (
        ("a100", 3, 300e9, "NVIDIA A100 data sheet"),
        ("h100", 4, 450e9, "NVIDIA H100 data sheet, SXM"),
        ("h200", 4, 450e9, "NVIDIA H200 data sheet, SXM"),
        ("b200", 5, 900e9, "NVIDIA HGX B200 data sheet"),
    )
}

NETWORKS = {
    f"{speed}g": Link(
        f"{speed} Gb/s network",
        speed / 8 * 1e9,
        20e-6,
        source=f"line rate of one adapter for each GPU, of which 0.5 to 0.9 is reached; {_LATENCY}",
    )
    for speed in (100, 200, 400)
}


def _tpu(name: str, memory: int, devices: int, peak: float, memory_bandwidth: float, pod: int) -> Chip:
    """A device of a TPU; figures of the chip's page, divided by its devices."""
    page = f"https://cloud.google.com/tpu/docs/{'v5e' if name == 'v5e' else name}"
    return Chip(
        name,
        "tpu",
        memory,
        devices,
        peak,
        peak / 6,
        memory_bandwidth,
        _ICI[name],
        pod=pod * devices,
        sources={
            "memory": f"{page}, HBM of a chip",
            "peak": f"{page}, peak compute of a chip, bf16",
            "peak_float32": "peak / 6: float32 products are six passes in bfloat16 (jax.lax.Precision.HIGHEST)",
            "memory_bandwidth": f"{page}, HBM bandwidth of a chip",
            "link": _ICI[name].source,
            "pod": f"{page}, chips of a pod",
        },
    )


def _gpu(name: str, memory: int, peak: float, peak_float32: float, memory_bandwidth: float) -> Chip:
    """A GPU with NVLink, in hosts of eight, with an adapter of 400 Gb/s for each GPU (A100: 200)."""
    network = NETWORKS["200g" if name == "a100" else "400g"]
    sheet = f"NVIDIA {name.upper()} data sheet, SXM"
    return Chip(
        name,
        "gpu",
        memory,
        1,
        peak,
        peak_float32,
        memory_bandwidth,
        _NVLINK[name],
        host=8,
        network=network,
        sources={
            "memory": "target specifications of the XLA compiler, device_memory_size",
            "peak": f"{sheet}, bfloat16 tensor cores, dense",
            "peak_float32": f"{sheet}, float32",
            "memory_bandwidth": sheet,
            "link": _NVLINK[name].source,
            "network": network.source,
        },
    )


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 32 * GIB, 1, 275e12, 1.2e12, 4096),
        _tpu("v5e", 16 * GIB, 1, 197e12, 0.81e12, 256),
        _tpu("v5p", 95 * GIB, 1, 459e12, 2.77e12, 8960),
        _tpu("v6e", 32 * GIB, 1, 918e12, 1.6e12, 256),
        _tpu("tpu7x", 96 * GIB, 2, 2307e12 / 2, 7.4e12 / 2, 9216),
        _gpu("a100", 85_100_068_864, 312e12, 19.5e12, 2.0e12),
        _gpu("h100", 84_942_979_072, 989e12, 66.9e12, 3.35e12),
        _gpu("h200", 151_397_597_184, 989e12, 66.9e12, 4.8e12),
        _gpu("b200", 191_514_411_008, 2250e12, 75e12, 8.0e12),
    )
}
