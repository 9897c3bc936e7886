"""What may not matter changes no bit, and what is broken stays with those who may see it."""

import numpy as np
import pytest

from ringjax.attention import Mask
from ringjax.attention.kernels import CpuKernel, XlaKernel


@pytest.fixture(params=[XlaKernel(q_tile=10, k_tile=4), CpuKernel()], ids=["xla", "cpu"])
def kernel(request):
    """Both kernels that run here, with several documents in a tile."""
    return request.param


def with_inputs(problem, inputs, **options):
    """A problem with inputs of the test's own."""
    case = problem(**options)
    object.__setattr__(case, "inputs", tuple(inputs))
    return case


def test_tokens_and_documents_that_may_not_matter_change_no_bit(problem, kernel):
    case = problem(packed=True)
    before = case.run(4, "zigzag", kernel)
    segments = case.segments
    document = (segments == 2) & (np.arange(2)[:, None] == 0)
    assert document.any()
    changed = problem(packed=True)
    q, k, v, dout, dlse = (x.copy() for x in case.inputs)
    for x in (q, k, v):
        x[document] += 1
    object.__setattr__(changed, "inputs", (q, k, v, dout, dlse))
    after = changed.run(4, "zigzag", kernel)
    for name in before:
        np.testing.assert_array_equal(before[name][~document], after[name][~document], err_msg=name)
        assert (before[name][document] != after[name][document]).any(), name

    future = problem(packed=False)
    cut = 29
    arrays = [x.copy() for x in future.inputs]
    for x in arrays[:3]:
        x[:, cut:] *= -2
    later = problem(packed=False)
    object.__setattr__(later, "inputs", tuple(arrays))
    before, after = future.run(4, "striped", kernel), later.run(4, "striped", kernel)
    np.testing.assert_array_equal(before["out"][:, :cut], after["out"][:, :cut])
    np.testing.assert_array_equal(before["lse"][:, :cut], after["lse"][:, :cut])


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        ("contiguous", Mask(causal=False)),
        ("zigzag", Mask()),
        ("zigzag", Mask(window=6)),
        ("striped", Mask(prefix_length=5)),
    ],
)
def test_nothing_leaves_a_document(problem, kernel, layout, mask):
    # The whole document becomes infinite or NaN; tiles of 10 by 4 hold tokens of several documents.
    case = problem(packed=True, mask=mask)
    before = case.run(4, layout, kernel)
    document = case.segments == 2
    assert document.any(axis=1).all()
    arrays = [x.copy() for x in case.inputs]
    for x, value in zip(arrays, (np.nan, np.inf, -np.inf, np.nan, np.nan), strict=True):
        x[document] = value
    after = with_inputs(problem, arrays, packed=True, mask=mask).run(4, layout, kernel)
    for name in before:
        np.testing.assert_array_equal(before[name][~document], after[name][~document], err_msg=name)
        assert not np.isfinite(after[name][document]).any(), name


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_numbers_whose_products_overflow_stay_in_their_document(problem, kernel, softcap):
    options = {"packed": True, "mask": Mask(causal=False), "softcap": softcap}
    case = problem(**options)
    before = case.run(4, "zigzag", kernel)
    document = (case.segments == 2) | (case.segments < 0)
    for which in (0, 1, 2, 3):
        arrays = [x.copy() for x in case.inputs]
        arrays[which][document] = 3e38
        after = with_inputs(problem, arrays, **options).run(4, "zigzag", kernel)
        for name in before:
            np.testing.assert_array_equal(before[name][~document], after[name][~document], err_msg=f"{which} {name}")
        for name in ("out", "dq", "dk", "dv"):
            assert (after[name][case.segments < 0] == 0).all(), name


def test_broken_padding_has_no_effect_and_no_gradient(problem, kernel):
    case = problem(packed=True)
    before = case.run(4, "zigzag", kernel)
    padding = case.segments < 0
    arrays = [x.copy() for x in case.inputs]
    for x in arrays[:4]:
        x[padding] = np.nan
    after = with_inputs(problem, arrays, packed=True).run(4, "zigzag", kernel)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    for name in ("out", "dq", "dk", "dv"):
        assert (after[name][padding] == 0).all(), name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_broken_token_reaches_no_earlier_one(problem, kernel, layout):
    case = problem()
    arrays = [x.copy() for x in case.inputs]
    for x in arrays[:3]:
        x[:, 29] = np.nan
    before, after = case.run(4, layout, kernel), with_inputs(problem, arrays).run(4, layout, kernel)
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(before[name][:, :29], after[name][:, :29], err_msg=name)
        assert np.isnan(after[name][:, 29:]).all(), name


def test_tokens_beyond_the_window_change_no_bit(problem, kernel):
    window, at = 7, 20
    case = problem(mask=Mask(window=window))
    arrays = [x.copy() for x in case.inputs]
    for x in arrays[1:3]:
        x[:, at] += 1
    changed = with_inputs(problem, arrays, mask=Mask(window=window))
    for layout in ("contiguous", "zigzag", "striped"):
        before, after = case.run(4, layout, kernel), changed.run(4, layout, kernel)
        sees = np.arange(48) - at
        sees = (sees >= 0) & (sees < window)
        np.testing.assert_array_equal(before["out"][:, ~sees], after["out"][:, ~sees])
        assert (before["out"][:, sees] != after["out"][:, sees]).any(axis=-1).all()
