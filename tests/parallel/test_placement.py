"""Where devices stand: rings inside hosts and slices while there is a way."""

from types import SimpleNamespace

import numpy as np
import pytest

from ringjax.parallel import AXES, MeshError
from ringjax.parallel.placement import crossings, place


def machine(hosts, each, slices=False, **more):
    """GPUs of several hosts, each host a process, or TPUs of several slices."""
    kind = "slice_index" if slices else "process_index"
    return [
        SimpleNamespace(id=host * each + i, platform="gpu", device_kind="H100", **{kind: host}, **more)
        for host in range(hosts)
        for i in range(each)
    ]


def sizes(**axes):
    return {axis: axes.get(axis, 1) for axis in AXES}


def hosts_of(devices, axes, kind="process_index", **options):
    """For each host or slice, the coordinates of its devices."""
    placed = place(devices, sizes(**axes), **options)
    assert placed.shape == tuple(sizes(**axes).values())
    assert {device.id for device in placed.flat} == set(range(len(devices)))
    return np.vectorize(lambda device: getattr(device, kind))(placed)


def rings(hosts):
    """How many hosts each ring, with its tensor groups, stands on."""
    return {len(set(ring.ravel())) for ring in hosts.reshape(-1, *hosts.shape[-2:])}


@pytest.mark.parametrize(
    ("hosts", "axes"),
    [
        (1, {"seq": 8}),
        (2, {"data": 2, "seq": 8}),
        (4, {"stage": 2, "fsdp": 2, "seq": 4, "tensor": 2}),
        (4, {"data": 8, "seq": 4}),
        (6, {"stage": 2, "data": 3, "seq": 8}),  # 6 hosts: the factor 2 from one axis, 3 from the other
        (2, {"stage": 4, "tensor": 4}),
    ],
)
def test_a_ring_that_fits_stays_on_its_host(hosts, axes):
    devices = machine(hosts, 8)
    assert rings(hosts_of(devices, axes)) == {1}
    assert crossings(devices, sizes(**axes)) == []


def test_slices_come_before_processes():
    devices = machine(2, 8, slices=True, process_index=0)
    assert rings(hosts_of(devices, {"fsdp": 2, "seq": 8}, "slice_index")) == {1}


def test_a_ring_larger_than_a_host_crosses_as_few_borders_as_it_must():
    devices = machine(8, 8)
    hosts = hosts_of(devices, {"data": 2, "seq": 32})
    assert rings(hosts) == {4}
    for ring in hosts.reshape(2, 32):
        assert np.count_nonzero(ring != np.roll(ring, 1)) == 4  # each host is entered once in a lap
    assert crossings(devices, sizes(data=2, seq=32)) == ["mesh.seq = 32 crosses 4 hosts: one has 8 devices"]


def test_a_ring_that_would_cross_for_no_reason_is_refused_unless_asked_for():
    devices = machine(2, 6)
    with pytest.raises(
        MeshError,
        match=r"mesh.seq \* mesh.tensor = 4 .* 6 of a host .* one of 1, 2, 3, 6, or set mesh.ring_may_",
    ):
        place(devices, sizes(data=3, seq=4))
    assert rings(hosts_of(devices, {"data": 3, "seq": 4}, ring_may_cross=True)) == {2}


def test_hosts_must_give_equal_numbers():
    devices = machine(2, 8)[:12]
    with pytest.raises(MeshError, match=r"of data=3 x seq=4 = 12 they give host 0: 8, host 1: 4"):
        place(devices, sizes(data=3, seq=4))
