"""Mistakes are refused before work starts, with what was required, what was given and what to change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ringjax.attention import Mask, get_layout, ring_attention, ring_attention_shard


def arrays(q=(2, 16, 4, 8), k=(2, 16, 2, 8), v=(2, 16, 2, 8), dtype=jnp.float32):
    return [jnp.zeros(shape, dtype) for shape in (q, k, v)]


TOKENS = jnp.zeros((2, 16), jnp.int32)

CASES = {
    "rank": (arrays(q=(16, 4, 8)), {}, r"q must be \[B, S, H, D\].*got q \(16, 4, 8\)"),
    "lengths": (arrays(k=(2, 8, 2, 8)), {}, "k \\(2, 8, 2, 8\\), v \\(2, 16, 2, 8\\)"),
    "batches": (arrays(v=(1, 16, 2, 8)), {}, "one batch size, k and v one sequence length"),
    "head dim": (arrays(k=(2, 16, 2, 4)), {}, "the same head dim"),
    "kv heads": (arrays(v=(2, 16, 1, 8)), {}, "k and v must have the same number of heads"),
    "groups": (arrays(q=(2, 16, 3, 8)), {}, "a multiple of the number of key/value heads"),
    "empty": (arrays(q=(0, 16, 4, 8), k=(0, 16, 2, 8), v=(0, 16, 2, 8)), {}, "no dim of q, k, v may be empty"),
    "integers": (arrays(dtype=jnp.int32), {}, "one dtype, of float32, bfloat16, float16; got q int32"),
    "mixed": ([*arrays()[:2], arrays(dtype=jnp.bfloat16)[2]], {}, "one dtype.*v bfloat16"),
    "layout": (arrays(), {"layout": "spiral"}, "unknown layout 'spiral'"),
    "layout type": (arrays(), {"layout": get_layout("zigzag")}, "a layout is given by its name.*got Zigzag"),
    "kernel": (arrays(), {"kernel": "magic"}, "unknown kernel 'magic'"),
    "kernel type": (arrays(), {"kernel": ["xla"]}, "a kernel is given by its name.*got list"),
    "mask type": (arrays(), {"mask": np.ones((16, 16), bool)}, r"mask must be a Mask.*got bool \(16, 16\)"),
    "strategy": (arrays(), {"strategy": "telepathy"}, "unknown strategy 'telepathy'"),
    "softcap": (arrays(), {"softcap": 0.0}, "softcap must be None or a finite number above 0, static; got 0.0"),
    "softcap type": (arrays(), {"softcap": True}, "softcap must be None or a finite number above 0.*True"),
    "sinks shape": (
        arrays(),
        {"sinks": jnp.zeros(3)},
        r"sinks must be floating.*\[H\] = \(4,\); got float32 \(3,\)",
    ),
    "sinks type": (arrays(), {"sinks": jnp.zeros(4, jnp.int32)}, "sinks must be floating-point.*int32"),
    "sinks list": (arrays(), {"sinks": [0.0] * 4}, "sinks must be floating-point"),
    "slopes shape": (arrays(), {"alibi_slopes": np.ones(2)}, r"alibi_slopes must be finite.*\[H\] = \(4,\)"),
    "slopes": (arrays(), {"alibi_slopes": [1.0, 2.0, 3.0, np.inf]}, "alibi_slopes must be finite"),
    "rate": (arrays(), {"dropout_rate": 1.0}, "dropout_rate must be a number of at least 0 and below 1.*got 1.0"),
    "no seed": (arrays(), {"dropout_rate": 0.1}, "there is no dropout_seed: give an integer or a jax.random key"),
    "seed": (arrays(), {"dropout_rate": 0.1, "dropout_seed": 1.5}, "dropout_seed must be one integer.*got 1.5"),
    "seeds": (arrays(), {"dropout_rate": 0.1, "dropout_seed": jnp.arange(3)}, r"dropout_seed.*int32 \(3,\)"),
    "wide seed": (arrays(), {"dropout_rate": 0.1, "dropout_seed": 2**32}, r"one integer in \[0, 2\^32\).*4294967296"),
    "negative seed": (
        arrays(),
        {"dropout_rate": 0.1, "dropout_seed": -1},
        "dropout_seed must be one integer.*got -1",
    ),
    "sequences": (
        arrays(),
        {"dropout_rate": 0.1, "dropout_seed": 1, "dropout_sequences": jnp.zeros((2, 3), jnp.int32)},
        r"dropout_sequences must be integers of shape \[B\] = .*int32 \(2, 3\)",
    ),
    "idle seed": (arrays(), {"dropout_seed": "x"}, "dropout_seed must be one integer.*got 'x'"),
    "large scale": (arrays(), {"scale": 1e39}, "scale must be a finite number.*1e\\+39"),
    "large softcap": (arrays(), {"softcap": 1e39}, "softcap must be None or a finite number"),
    "small softcap": (arrays(), {"softcap": 1e-46}, "softcap must be None or a finite number above 0"),
    "large slopes": (arrays(), {"alibi_slopes": np.full(4, 1e300)}, "alibi_slopes must be finite"),
    "mesh": (arrays(), {"mesh": "seq"}, "mesh must be a jax.sharding.Mesh.*got 'seq'"),
    "batch axes": (arrays(), {"batch_axes": 0}, "batch_axes must be names of mesh axes, or None; got 0"),
    "head axis type": (arrays(), {"head_axis": 0}, "head_axis one or None; got 'seq', 0"),
    "no head axis": (arrays(), {"head_axis": ""}, "the mesh has no axis ''"),
    "lse": (arrays(), {"return_lse": 1}, "return_lse must be True or False, got 1"),
    "layouts": (arrays(), {"layout": ["zigzag"]}, r"a layout is given by its name.*got list"),
    "cross alibi": (
        arrays(k=(2, 8, 2, 8), v=(2, 8, 2, 8)),
        {"mask": Mask(causal=False), "alibi_slopes": np.ones(4)},
        "the mask or ALiBi compares positions",
    ),
    "cross": (
        arrays(k=(2, 8, 2, 8), v=(2, 8, 2, 8)),
        {},
        r"q has 16 tokens and k 8, and the mask or ALiBi compares positions",
    ),
    "cross segments": (
        arrays(k=(2, 8, 2, 8), v=(2, 8, 2, 8)),
        {"mask": Mask(causal=False), "segment_ids": TOKENS},
        "segment_ids cannot serve for both: give kv_segment_ids too",
    ),
    "keys alone": (arrays(), {"kv_positions": TOKENS}, "kv_positions is given and positions is not: give both"),
    "kv tokens": (
        arrays(),
        {"segment_ids": TOKENS, "kv_segment_ids": TOKENS[:1]},
        r"kv_segment_ids must be integers of shape \[B, S\] = \(2, 16\); got int32 \(1, 16\)",
    ),
    "seq axis": (arrays(), {"seq_axis": "ring"}, "the mesh has no axis 'ring', it has data, seq"),
    "batch axis": (arrays(), {"batch_axes": ("rows",)}, "the mesh has no axis 'rows'"),
    "head axis": (arrays(), {"head_axis": "tensor"}, "the mesh has no axis 'tensor'"),
    "axis twice": (arrays(), {"head_axis": "seq"}, "'seq' is used twice"),
    "batch size": (
        arrays((1, 16, 4, 8), (1, 16, 2, 8), (1, 16, 2, 8)),
        {},
        "multiple of 2, the devices along data; got 1",
    ),
    "heads": (
        arrays((2, 16, 3, 8), (2, 16, 3, 8), (2, 16, 3, 8)),
        {"batch_axes": None, "head_axis": "data"},
        "heads must be multiples of 2, the devices along 'data'; got 3 and 3",
    ),
    "segment shape": (arrays(), {"segment_ids": TOKENS[:, :8]}, r"segment_ids must be integers of shape.*\(2, 8\)"),
    "segment type": (arrays(), {"segment_ids": TOKENS * 1.0}, "segment_ids must be integers.*float32"),
    "position shape": (arrays(), {"positions": TOKENS[0]}, r"positions must be integers of shape.*\(16,\)"),
    "scale": (arrays(), {"scale": float("nan")}, "scale must be a finite number.*got nan"),
    "scale type": (arrays(), {"scale": "half"}, "scale must be a finite number.*got 'half'"),
    "no array": ([[1.0], None, 2], {}, "q, k and v must be arrays; got list, NoneType, int"),
    "wide segments": (arrays(), {"segment_ids": np.full((2, 16), 2**32)}, "must fit into int32.*4294967296"),
    "wide positions": (arrays(), {"positions": np.full((2, 16), -(2**31) - 1)}, "positions must fit into int32"),
    "unsigned": (arrays(), {"segment_ids": TOKENS.astype(jnp.uint32)}, "must be int32 or narrower; got uint32"),
    "mask": (arrays(), {"mask": "causal"}, "mask must be a Mask, such as Mask\\(causal=True\\), got 'causal'"),
}


@pytest.mark.parametrize(("inputs", "options", "message"), CASES.values(), ids=CASES.keys())
def test_is_refused(mesh_of, inputs, options, message):
    with pytest.raises(ValueError, match=message):
        ring_attention(*inputs, **{"mesh": mesh_of(4, data=2)} | options)


def test_without_any_mesh():
    with pytest.raises(ValueError, match=r"needs a mesh: pass mesh=\.\.\., or set one with jax.set_mesh"):
        ring_attention(*arrays())


def test_a_scale_that_is_traced(mesh_of):
    with pytest.raises(ValueError, match="static"):
        jax.jit(lambda scale: ring_attention(*arrays(), mesh=mesh_of(4), scale=scale))(0.5)


def test_is_refused_while_tracing_too(mesh_of):
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        jax.eval_shape(lambda *x: ring_attention(*x, mesh=mesh_of(4), layout="spiral"), *arrays())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "Mask.window must be None or an integer of at least 1.*got 0"),
        ({"window": 2.0}, "Mask.window must be None or an integer.*got 2.0"),
        ({"prefix_length": -1}, "Mask.prefix_length must be None or an integer of at least 0.*got -1"),
        ({"prefix_length": True}, "Mask.prefix_length must be None or an integer.*got True"),
        ({"causal": 1}, "Mask.causal must be True or False, got 1"),
        ({"window": 2**31}, "fits into int32"),
    ],
)
def test_masks(options, message):
    with pytest.raises(ValueError, match=message):
        Mask(**options)


def test_slopes_that_are_traced(mesh_of):
    # They have no gradient, and a gradient of 0 would be a lie.
    attend = jax.jit(lambda slopes: ring_attention(*arrays(), mesh=mesh_of(4), alibi_slopes=slopes))
    with pytest.raises(ValueError, match="alibi_slopes are constants and have no gradient"):
        attend(jnp.ones(4))


def test_inside_a_shard_map(mesh_of):
    spec, mesh = PartitionSpec(None, "seq"), mesh_of(4)
    attend = jax.shard_map(partial(ring_attention, mesh=mesh), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(ValueError, match="call ring_attention_shard on the local blocks"):
        attend(*arrays())


def test_two_meshes(mesh_of):
    with (
        jax.set_mesh(mesh_of(4)),
        pytest.raises(ValueError, match=r"mesh is {'seq': 2}, and the mesh set here .* is {'seq': 4}"),
    ):
        ring_attention(*arrays(), mesh=mesh_of(2))


def test_a_mesh_without_devices(mesh_of):
    with pytest.raises(ValueError, match="an abstract mesh has no devices"):
        ring_attention(*arrays(), mesh=mesh_of(2).abstract_mesh)


def test_a_shard_outside_of_shard_map(mesh_of):
    with pytest.raises(ValueError, match=r"inside a jax\.shard_map that is manual over seq_axis='seq'.*here: none"):
        ring_attention_shard(*arrays())


def test_a_shard_that_its_layout_cannot_cut(mesh_of):
    spec = PartitionSpec(None, "seq")
    attend = jax.shard_map(
        partial(ring_attention_shard, layout="zigzag"), mesh=mesh_of(4), in_specs=(spec,) * 3, out_specs=spec
    )
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        attend(*arrays((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)))
