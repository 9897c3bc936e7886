"""Machines by name: what there is not is refused, with what to do."""

import importlib.util

import jax
import pytest

from ringjax.config import MeshConfig
from ringjax.parallel import MeshError, TopologyError, get_topology, make_mesh
from ringjax.parallel import topology as module
from ringjax.planner import CHIPS
from ringjax.planner.machine import SLICE_DIMS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", "unknown topology 'v5p': write the chip, a colon and the sizes, as v5p:4x4x8"),
        ("v5p:4*4", "write the chip, a colon and the sizes"),
        ("", "unknown topology ''"),
        ("h10:8", "unknown chip 'h10' in 'h10:8'; did you mean h100:8"),
        ("m3:8", r"unknown chip 'm3' in 'm3:8'.*The chips are v4, v5e"),
        ("v5p:4x4", "a v5p slice has 3 sides, as v5p:4x4x4; got 'v5p:4x4'"),
        ("v5e:4", "a v5e slice has 2 sides"),
        ("h100:2x2x2", "h100 machines are GPUs, or hosts x GPUs, as h100:8 or h100:4x8; got 'h100:2x2x2'"),
        ("h100:0x8", "no size of a topology may be 0"),
    ],
)
def test_names_that_are_no_machine(name, message):
    with pytest.raises(TopologyError, match=message):
        get_topology(name)


@pytest.mark.parametrize(
    ("name", "plugin", "extra"),
    [("v5e:2x2", "libtpu", "tpu"), ("h100:4x8", "jax_cuda13_plugin", "cuda13-compiler")],
)
def test_a_missing_plugin_is_named_by_its_extra(name, plugin, extra):
    assert importlib.util.find_spec(plugin) is None, "accelerators' plugins stay out of this environment"
    with pytest.raises(TopologyError, match=rf"nothing here compiles for {name}.*ringjax\[{extra}\]"):
        get_topology(name)


def test_every_gpu_has_a_specification():
    assert module._GPUS.keys() == {name for name, chip in CHIPS.items() if chip.platform == "gpu"}
    assert SLICE_DIMS.keys() == {name for name, chip in CHIPS.items() if chip.platform == "tpu"}
    text = module._target(CHIPS["h100"])
    assert "device_memory_size: 84942979072" in text
    assert text.count("{") == text.count("}")


def test_a_mesh_fills_its_machine():
    with pytest.raises(MeshError, match=r"the machine has 4 devices, and the mesh 8 \(data=2 x seq=4\).*mesh.seq"):
        make_mesh(MeshConfig(data=2, seq=4), devices=jax.devices()[:4])
    assert make_mesh(MeshConfig(seq=4), devices=jax.devices()[:4]).shape["seq"] == 4
