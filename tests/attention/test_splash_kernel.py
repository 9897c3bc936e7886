"""Splash as a block kernel, interpreted: what it refuses, broken values, documents, and the ring around it.

What it computes is checked in test_kernels.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask, ring_attention
from ringjax.attention.kernels import Lead, Order, Relation, SplashKernel, XlaKernel, jax_private
from ringjax.attention.kernels.splash import _tables
from ringjax.attention.mask import Tokens
from ringjax.attention.scores import ScoreRule

pytestmark = [pytest.mark.spread, pytest.mark.usefixtures("quick_compiler")]

SMALL = SplashKernel(tile=128, exact=XlaKernel(), interpret=True)
BARS = {"out": 2e-6, "lse": 2e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5}
HEAD = {"dim": 64, "value_dim": 64, "heads": 2, "kv_heads": 1, "batch": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ring_equals_the_oracle_and_rounds_nothing_between_hops(problem, mesh_of, dtype):
    case = problem(**HEAD, seq=512, dtype=dtype)
    errors = case.errors(case.run(2, "zigzag", SMALL, mesh=mesh_of(2, unused=1)))
    alone = case.errors(case.run(1, "contiguous", XlaKernel()))
    assert all(error <= max(BARS[name], 1.25 * alone[name] * (dtype != "float32")) for name, error in errors.items())


def call(mask=Mask(), order=Order.SLOTS, lead=Lead(), segments=None, **rule):  # noqa: B008 (frozen)
    tokens = Tokens(segments=segments)
    return Relation(mask, order, lead, tokens, tokens), ScoreRule(**{"scale": 0.125, **rule})


@pytest.mark.parametrize(
    ("length", "dim", "dtype", "relation_and_rule", "reason"),
    [
        (256, 64, "bfloat16", call(), None),
        (256, 64, "bfloat16", call(Mask(window=40), lead=Lead(4, 3, 3, 3), softcap=5.0), None),
        (256, 64, "float16", call(), "float16"),
        (256, 64, "float32", call(), "rounds float32"),
        (256, 40, "bfloat16", call(), "multiples of 64; got 40"),
        (200, 64, "bfloat16", call(), "multiples of 128"),
        (256, 128, "bfloat16", call(scale=128**-0.5), "no scale.*power of two"),
        (256, 64, "bfloat16", call(alibi=True), "ALiBi"),
        (256, 64, "bfloat16", call(dropout=0.1), "dropout"),
        (256, 64, "bfloat16", call(order=Order.ANY), "positions that are data"),
        (256, 64, "bfloat16", call(lead=Lead(4, 0, -3, 3)), "known when the program is built"),
    ],
)
def test_what_it_refuses(length, dim, dtype, relation_and_rule, reason):
    q, kv = jnp.zeros((1, 1, 2, length, dim), dtype), jnp.zeros((1, 1, length, 2 * dim), dtype)
    refusal = SplashKernel().refusal(q, kv, *relation_and_rule)
    assert refusal is None if reason is None else re.search(reason, refusal or ""), refusal


def test_what_is_refused_is_an_error_and_nothing_else_runs():
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"kernel 'splash' cannot do.*power of two; use 'auto'"):
        jax.eval_shape(lambda x: ring_attention(x, x, x, mesh=mesh, kernel=SplashKernel()), x)


def test_another_splash_than_the_known_one_is_refused(monkeypatch):
    relation, rule = call()
    q, kv = jnp.zeros((1, 1, 2, 256, 64), "bfloat16"), jnp.zeros((1, 1, 256, 128), "bfloat16")
    splash, _ = jax_private._splash()
    monkeypatch.setattr(splash, "_splash_attention_bwd_dq", lambda q, k: None)
    assert "another Splash attention" in (SplashKernel().refusal(q, kv, relation, rule) or "")


def test_nothing_leaves_a_document(problem):
    """Splash itself would let it: 0 times NaN is NaN."""
    case, broken = (problem(**HEAD, seq=256, packed=True) for _ in range(2))
    document = case.segments == 2
    assert document.any()
    arrays = [x.copy() for x in case.inputs]
    for x, value in zip(arrays, (np.nan, np.inf, -np.inf, np.nan, np.nan), strict=True):
        x[document] = value
    object.__setattr__(broken, "inputs", tuple(arrays))
    before, after = (one.run(1, "contiguous", SMALL) for one in (case, broken))
    errors = case.errors(before)
    assert all(error <= BARS[name] for name, error in errors.items()), errors
    for name in before:
        np.testing.assert_allclose(after[name][~document], before[name][~document], atol=1e-5, err_msg=name)
        assert not np.isfinite(after[name][document]).any(), name


@pytest.mark.parametrize("keys_stay", [False, True])
@pytest.mark.parametrize(
    ("mask", "lead"),
    [
        (Mask(), Lead()),
        (Mask(), Lead(1, -300, -300, -300)),
        (Mask(window=3), Lead(7, 20, 20, 20)),
        (Mask(causal=False, window=130), Lead(1, 256, 256, 256)),
        (Mask(window=5), Lead(1, 4000, 4000, 4000)),
    ],
)
def test_every_tile_that_sees_something_is_visited_once(mask, lead, keys_stay):
    lengths, tiles = (512, 768), (128, 256)
    relation, _ = call(mask, lead=lead)
    tables = _tables(relation, lengths, tiles, keys_stay)
    assert tables is not None
    q, k = np.ogrid[: lengths[0], : lengths[1]]
    ahead = lead.stride * (q - k) + lead.by
    low, high = mask.differences
    seen = (ahead >= low) & (ahead <= high)
    np.testing.assert_array_equal(tables.sees(q, k), seen)
    want = {(i // tiles[0], j // tiles[1]) for i, j in np.argwhere(seen)}
    comes, needed = (x.T if keys_stay else x for x in (tables.comes, tables.needed))
    visited = [(stay, come) for stay, t in np.argwhere(needed == 2) if (come := comes[stay, t]) is not None]
    visited = [(come, stay) if keys_stay else (stay, come) for stay, come in visited]
    assert len(set(visited)) == len(visited)
    assert {(int(i), int(j)) for i, j in visited} == want
