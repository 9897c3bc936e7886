"""Partial results and their merge."""

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention.softmax import Partial, merge, merge_attention


def partial_result(scores, values) -> Partial:
    """Attention of rows over a few keys, in float64; with no keys, the identity."""
    if scores.shape[1] == 0:
        return Partial(jnp.zeros((len(scores), values.shape[1])), jnp.full(len(scores), -jnp.inf))
    top = scores.max(1, keepdims=True)
    weights = np.exp(scores - top)
    lse = np.log(weights.sum(1)) + top[:, 0]
    out = weights @ values / weights.sum(1, keepdims=True)
    return Partial(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("cuts", [(4, 9), (0, 12), (5, 5)])
def test_merging_parts_in_any_order_gives_the_whole(scale, cuts):
    rng = np.random.default_rng(0)
    scores, values = scale * rng.normal(size=(7, 12)), rng.normal(size=(12, 3))
    parts = [
        partial_result(s, v) for s, v in zip(np.split(scores, cuts, axis=1), np.split(values, cuts), strict=True)
    ]
    whole = partial_result(scores, values)
    for a, b, c in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        for merged in (merge(merge(parts[a], parts[b]), parts[c]), merge(parts[a], merge(parts[b], parts[c]))):
            np.testing.assert_allclose(merged.out, whole.out, rtol=2e-6, atol=1e-6)
            np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-6)


OUT, LSE = jnp.ones((2, 3, 4)), jnp.zeros((2, 3))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((OUT, LSE), (OUT[:1], LSE[:1]), r"of the same queries, got out \(2, 3, 4\) and \(1, 3, 4\)"),
        ((OUT, LSE), (OUT[..., :1], LSE), "of the same queries"),
        ((OUT.astype(int), LSE), (OUT, LSE), "a must be .*floating-point numbers; got out int32"),
        ((OUT, LSE), (OUT, LSE[:1]), r"b must be .*lse float32 \(1, 3\)"),
        ((LSE, OUT), (OUT, LSE), "a must be "),
        ((OUT, LSE, LSE), (OUT, LSE), r"a must be \(out, lse\), two arrays"),
        ((OUT, LSE), None, r"b must be \(out, lse\), two arrays"),
        ((OUT, [0.0]), (OUT, LSE), r"a must be \(out, lse\), two arrays"),
    ],
)
def test_merging_what_does_not_belong_together_is_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        merge_attention(a, b)


def test_rows_without_keys_stay_empty_and_never_become_nan():
    empty = Partial(jnp.zeros((2, 3)), jnp.full(2, -jnp.inf))
    merged = merge(empty, empty)
    assert (merged.out == 0).all()
    assert jnp.isneginf(merged.lse).all()
    some = Partial(jnp.ones((2, 3)), jnp.array([5.0, -jnp.inf]))
    some = some._replace(out=some.out.at[1].set(0))
    for merged in (merge(some, empty), merge(empty, some)):
        np.testing.assert_array_equal(merged.out, some.out)
        np.testing.assert_array_equal(merged.lse, some.lse)
