"""Mistakes are refused before work starts, with what was required, what was given and what to change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask, ring_attention


def arrays(q=(2, 16, 4, 8), k=(2, 16, 2, 8), v=(2, 16, 2, 8), dtype=jnp.float32):
    return [jnp.zeros(shape, dtype) for shape in (q, k, v)]


TOKENS = jnp.zeros((2, 16), jnp.int32)

CASES = {
    "rank": (arrays(q=(16, 4, 8)), {}, r"q must be \[B, S, H, D\].*got q \(16, 4, 8\)"),
    "lengths": (arrays(k=(2, 8, 2, 8)), {}, "the same batch size and sequence length"),
    "batches": (arrays(v=(1, 16, 2, 8)), {}, "the same batch size and sequence length"),
    "head dim": (arrays(k=(2, 16, 2, 4)), {}, "the same head dim"),
    "kv heads": (arrays(v=(2, 16, 1, 8)), {}, "k and v must have the same number of heads"),
    "groups": (arrays(q=(2, 16, 3, 8)), {}, "a multiple of the number of key/value heads"),
    "empty": (arrays(q=(0, 16, 4, 8), k=(0, 16, 2, 8), v=(0, 16, 2, 8)), {}, "no dim of q, k, v may be empty"),
    "integers": (arrays(dtype=jnp.int32), {}, "one dtype, of float32, bfloat16, float16; got q int32"),
    "mixed": ([*arrays()[:2], arrays(dtype=jnp.bfloat16)[2]], {}, "one dtype.*v bfloat16"),
    "cut": (
        arrays((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)),
        {"layout": "zigzag"},
        "multiple of 8, got 12; use 8",
    ),
    "layout": (arrays(), {"layout": "spiral"}, "unknown layout 'spiral'"),
    "kernel": (arrays(), {"kernel": "magic"}, "unknown kernel 'magic'"),
    "strategy": (arrays(), {"strategy": "telepathy"}, "unknown strategy 'telepathy'"),
    "window": (arrays(), {"mask": Mask(window=4)}, "mask.window is not supported yet"),
    "prefix": (arrays(), {"mask": Mask(prefix_length=4)}, "mask.prefix_length is not supported yet"),
    "softcap": (arrays(), {"softcap": 30.0}, "softcap is not supported yet"),
    "sinks": (arrays(), {"sinks": jnp.zeros(4)}, "sinks is not supported yet"),
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
        ring_attention(*inputs, mesh=mesh_of(4, data=2), **options)


def test_without_any_mesh():
    with pytest.raises(ValueError, match=r"needs a mesh: pass mesh=\.\.\., or set one with jax.set_mesh"):
        ring_attention(*arrays())


def test_a_scale_that_is_traced(mesh_of):
    with pytest.raises(ValueError, match="static"):
        jax.jit(lambda scale: ring_attention(*arrays(), mesh=mesh_of(4), scale=scale))(0.5)


def test_is_refused_while_tracing_too(mesh_of):
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        jax.eval_shape(
            lambda *x: ring_attention(*x, mesh=mesh_of(4), layout="zigzag"),
            *arrays((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)),
        )
