"""Collectives read from the text of programs: compiled here, and by hand in the forms of other platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ringjax.parallel import loop_trips, read_collectives, traffic

SIZES = {"data": 2, "seq": 3, "tensor": 4}
PLACES = {"data": 2, "fsdp": 2, "seq": 4}  # of what is written by hand


def mesh_of(order):
    """24 of the devices, in any order."""
    devices = np.array(jax.devices())[np.asarray(order)].reshape(tuple(SIZES.values()))
    return Mesh(devices, tuple(SIZES), axis_types=(AxisType.Auto,) * 3)


def text_of(mesh, function, *shapes):
    """The compiled text of a function on one device's arrays, all of them replicated at first."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
    assert text
    return text


def every_kind(axis, size):
    """Each kind of collective over an axis. What goes in has a size of its own for each axis."""

    def run(x):
        return (
            jax.lax.psum(x, axis),
            jax.lax.all_gather(x, axis),
            jax.lax.psum_scatter(x, axis, tiled=True),
            jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
            jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)]),
        )

    return run


def results(axes, x, size):
    """Bytes of what the five of them yield."""
    return {
        ("all-reduce", axes): 4 * x,
        ("all-gather", axes): 4 * x * size,
        ("reduce-scatter", axes): 4 * x // size,
        ("all-to-all", axes): 4 * x,
        ("collective-permute", axes): 4 * x,
    }


@pytest.mark.parametrize("order", [range(24), np.random.default_rng(0).permutation(32)[:24]], ids=["plain", "mixed"])
def test_every_kind_over_every_axis(order):
    """Programs number devices by their places in the mesh, whatever their ids."""

    def run(*arrays):
        return [every_kind(*axis)(x) for axis, x in zip(SIZES.items(), arrays, strict=True)]

    sizes = {"data": 24, "seq": 48, "tensor": 72}
    text = text_of(mesh_of(order), run, *((size,) for size in sizes.values()))
    expected = {}
    for axis, x in sizes.items():
        expected |= results((axis,), x, SIZES[axis])
    assert traffic(read_collectives(text, SIZES)) == expected


def test_several_axes_at_once():
    def run(x, y):
        return jax.lax.all_gather(x, ("data", "tensor")), jax.lax.psum(y, ("data", "seq", "tensor"))

    found = read_collectives(text_of(mesh_of(range(24)), run, (5,), (7,)), SIZES)
    assert traffic(found) == {("all-gather", ("data", "tensor")): 4 * 5 * 8, ("all-reduce", tuple(SIZES)): 4 * 7}


def test_loops_and_branches_count_as_often_as_they_run():
    def run(x):
        def inner(_, x):
            return jnp.sin(jax.lax.ppermute(x, "seq", [(0, 1), (1, 2), (2, 0)]))

        def outer(_, x):
            x = jax.lax.fori_loop(0, 3, inner, x)
            return jax.lax.cond(x[0] > 0, lambda x: jnp.cos(jax.lax.psum(x, "data")), jnp.tanh, x)

        return jax.lax.fori_loop(0, 5, outer, jax.lax.pmax(x, "tensor"))

    text = text_of(mesh_of(range(24)), run, (6,))
    found = {(one.kind, one.axes): one.times for one in read_collectives(text, SIZES)}
    assert found == {
        ("collective-permute", ("seq",)): 15,
        ("all-reduce", ("data",)): 5,
        ("all-reduce", ("tensor",)): 1,
    }
    assert sorted(loop_trips(text)) == [3, 5]


def test_a_loop_of_unknown_length():
    def run(x):
        return jax.lax.while_loop(lambda x: x[0] < 9, lambda x: jax.lax.psum(x, "data"), x)

    with pytest.raises(ValueError, match=r"without a known number of trips: .*while"):
        read_collectives(text_of(mesh_of(range(24)), run, (6,)), SIZES)


def operation(line, **axis_sizes):
    """The one collective of a program of one line."""
    (found,) = read_collectives(f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  ROOT %y = {line}\n}}", axis_sizes or PLACES)
    return found


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", ("data", "fsdp", "seq")),
        ("{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", ("seq",)),
        ("{{3,2,0,1},{4,5,6,7},{12,13,14,15},{8,9,10,11}}", ("seq",)),
        ("{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}", ("data",)),
        ("[4,4]<=[16]", ("seq",)),
        ("[8,2]<=[2,8]T(1,0)", ("data",)),
        ("[8,2]<=[2,2,4]T(0,2,1)", ("fsdp",)),
        ("[2,8]<=[2,2,4]T(1,0,2)", ("data", "seq")),
        ("[16,1]<=[16]", ()),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=4] {'axis_2'}", ("seq",)),
        ("mesh['axis_0'=4,'axis_1'=4] {'axis_0'}", ("data", "fsdp")),
        ("mesh['a'=16] {'a':(2)2}", ("fsdp",)),
        ("mesh['a'=2,'b'=8] {'a','b':(2)4}", ("data", "seq")),
        ("mesh['a'=16] {'a':(4)4,'a':(1)2}", ("data", "seq")),
        ("mesh['a'=2,'b'=8], device_ids=([2,2,4]T(1,0,2)) {'a'}", ("fsdp",)),
        ("mesh['a'=4,'b'=2,'c'=2], device_ids=([4,4]T(1,0)) {'b','c'}", ("data", "fsdp")),
        ("mesh['a'=2,'b'=8], device_ids=(8,9,10,11,12,13,14,15,0,1,2,3,4,5,6,7) {'a'}", ("data",)),
        # Halves of the ring, uneven groups, some of the devices, another mesh, and what nobody has seen yet.
        ("{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", None),
        ("{{0,1,2,3},{4,5,6,7},{8,9,10,11,12,13,14,15}}", None),
        ("{{0,1,2,3}}", None),
        ("{{0,16},{1,17}}", None),
        ("[8,2]<=[16]", None),
        ("something else", None),
    ],
)
def test_groups_in_all_their_forms(groups, axes):
    line = f"f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    assert operation(line).axes == axes


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("seq",)),
        ("{{0,1},{1,2},{2,3}}", ("seq",)),  # an open line
        ("{{0,8},{8,0},{1,9},{9,1}}", ("data",)),
        ("{{0,4},{4,0}}", ("fsdp",)),
        ("{{0,0},{5,9}}", ("data", "fsdp")),
        ("{{0,0},{1,1}}", ()),
        ("{{0,16}}", None),
    ],
)
def test_pairs_of_a_permute(pairs, axes):
    assert operation(f"f32[4]{{0}} collective-permute(%x), channel_id=1, source_target_pairs={pairs}").axes == axes


@pytest.mark.parametrize(
    ("line", "kind", "shape", "size"),
    [
        ("f32[] all-reduce(%x)", "all-reduce", (), 4),
        ("bf16[8,3]{1,0:T(8,128)(2,1)} all-gather(%x)", "all-gather", (8, 3), 48),
        ("s4[3]{0} all-to-all(%x)", "all-to-all", (3,), 2),
        ("f8e4m3fn[3]{0} all-gather(%x)", "all-gather", (3,), 3),
        ("pred[5]{0} all-gather(%x)", "all-gather", (5,), 5),
        ("(f32[2]{0}, f32[6]{0}) all-gather-start(%x)", "all-gather", (6,), 24),
        ("((f32[2]{0}), f32[1]{0}) reduce-scatter-start(%x)", "reduce-scatter", (1,), 4),
        ("f32[2]{0} all-reduce-start(%x)", "all-reduce", (2,), 8),
        (
            "(f32[8,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%x)",
            "collective-permute",
            (8, 4),
            128,
        ),
    ],
)
def test_the_result_is_what_counts(line, kind, shape, size):
    found = operation(f"{line}, replica_groups={{}}")
    assert (found.kind, found.shape, found.bytes) == (kind, shape, size)


@pytest.mark.parametrize(
    "operation",
    [
        "(f32[2]{0}, /*index=1*/bf16[3,1]{1,0}) all-reduce(%a, /*index=1*/%b)",
        "(f32[2]{0:T(128)}, bf16[3,1]{1,0:T(8,128)(2,1)}) all-reduce-start(%a, %b)",
        "((f32[1]{0}, bf16[3,9]{1,0}), (f32[2]{0}, bf16[3,1]{1,0}), u32[]) all-gather-start(%a, %b)",
    ],
)
def test_several_arrays_in_one_operation(operation):
    text = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %y = {operation}, replica_groups={{}}\n}}"
    assert [(one.dtype, one.shape) for one in read_collectives(text, PLACES)] == [("f32", (2,)), ("bf16", (3, 1))]


TPU = """
HloModule jit_step, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %sum = bf16[]{:T(256)} add(%a, %b)
}

%all-reduce-scatter.1 (input: bf16[8,4]) -> bf16[2,4] {
  %input = bf16[8,4]{1,0} parameter(0)
  %all-reduce.1 = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = bf16[2,4]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %i, %zero), dynamic_slice_sizes={2,4}
}

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[2,4]) {
  %fusion = bf16[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %done = (s32[], bf16[2,4]) tuple(%i, %fusion)
}

%condition (p: (s32[], bf16[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%unused (p: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (x: bf16[8,4]) -> (s32[], bf16[2,4]) {
  ROOT %while = (s32[]{:T(128)}, bf16[2,4]) while(%start), condition=%condition, body=%body
}
"""


def test_loops_and_reduce_scatters_of_a_tpu():
    (found,) = read_collectives(TPU, {"seq": 4})
    assert found == ("reduce-scatter", ("seq",), "bf16", (2, 4), 7)
    assert found.bytes == 7 * 2 * 4 * 2
