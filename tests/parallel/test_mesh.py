"""The mesh: sizes, order, virtual CPU devices, and one clear message when devices are missing."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

from ringjax.config import MeshConfig
from ringjax.parallel import AXES, MeshError, check_host_memory, make_mesh, single_device_mesh, start_devices


def test_every_axis_is_there_and_auto():
    mesh = make_mesh(MeshConfig(data=2, seq=4), "cpu")
    assert dict(mesh.shape) == {"stage": 1, "data": 2, "fsdp": 1, "seq": 4, "tensor": 1}
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)


def test_tensor_then_seq_neighbours_are_closest():
    ids = [[d.id for d in row] for row in make_mesh(MeshConfig(seq=4, tensor=2)).devices.reshape(4, 2)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_smaller_mesh_takes_the_first_devices():
    mesh = make_mesh(MeshConfig(seq=3))
    assert list(mesh.devices.flat) == jax.devices()[:3]
    assert list(single_device_mesh().devices.flat) == jax.devices()[:1]


def test_the_note_counts_virtual_devices():
    (note,) = start_devices(MeshConfig(seq=4), "auto")
    assert note.startswith("CPU: 4 virtual devices on ")
    assert start_devices(MeshConfig(), "cpu") == []


def test_too_few_cpu_devices_after_the_start_of_jax():
    with pytest.raises(MeshError, match=r"needs 64 devices \(data=4 x seq=16\).*32 CPU.*restart"):
        make_mesh(MeshConfig(data=4, seq=16), "cpu")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_missing_platform_is_never_replaced_by_the_cpu(platform):
    with pytest.raises(MeshError, match=f"run.platform={platform} needs a {platform.upper()}"):
        start_devices(MeshConfig(), platform)


def test_accelerators_are_counted(monkeypatch):
    accelerators = [SimpleNamespace(platform="gpu", device_kind="H100", process_index=0)] * 4
    monkeypatch.setattr(jax, "devices", lambda *_: accelerators)
    with pytest.raises(MeshError, match=r"needs 8 devices \(seq=4 x tensor=2\), and there are 4 \(H100\).*mesh.seq"):
        start_devices(MeshConfig(seq=4, tensor=2), "gpu")
    assert start_devices(MeshConfig(seq=2), "auto") == ["GPU: the mesh uses 2 of 4 devices (seq=2)"]
    assert start_devices(MeshConfig(seq=4), "auto") == []


def test_a_cpu_plays_so_many_devices_and_no_more():
    with pytest.raises(
        MeshError, match=r"needs 100000 devices \(data=100000\), and a CPU plays at most 1024; lower mesh.data"
    ):
        start_devices(MeshConfig(data=100_000), "cpu")


def test_host_memory_must_be_another_one():
    with pytest.raises(MeshError, match=r"these are CPU devices\. Set train\.offload=false"):
        check_host_memory(make_mesh(MeshConfig(), "cpu"))


def test_every_process_must_hold_a_share(monkeypatch):
    devices = [SimpleNamespace(platform="gpu", device_kind="H100", process_index=i // 4) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(MeshError, match=r"of data=3 x seq=2 = 6 the 2 processes hold 4, 2; change the mesh"):
        start_devices(MeshConfig(data=3, seq=2), "gpu")
    assert start_devices(MeshConfig(data=4, seq=2), "gpu") == []


def test_a_fresh_process_gets_as_many_cpu_devices_as_the_mesh_needs():
    program = (
        "from ringjax.config import MeshConfig; from ringjax.parallel import make_mesh, start_devices; import jax;"
        "print(start_devices(MeshConfig(seq=3, data=2), 'cpu'), len(jax.devices()));"
        "print(make_mesh(MeshConfig(seq=3)).size)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CPU: 6 virtual devices" in done.stdout
    assert done.stdout.split()[-2:] == ["6", "3"]
