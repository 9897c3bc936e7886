"""Layouts: which token sits where."""

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention.layout import LAYOUTS, get_layout

RINGS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_has_one_slot(name, ring):
    length = 6 * ring
    positions = get_layout(name).positions(length, ring)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(np.sort(positions), np.arange(length))


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_of_a_block_are_in_order_of_position(name):
    # The ring attends a block to itself by slot, not by position.
    blocks = get_layout(name).positions(48, 4).reshape(4, 12)
    assert (np.diff(blocks, axis=1) > 0).all()


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ("striped", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
    ],
)
def test_blocks_are_as_described(name, blocks):
    np.testing.assert_array_equal(get_layout(name).positions(12, 3).reshape(3, 4), blocks)


def test_zigzag_shares_causal_work_evenly():
    blocks = get_layout("zigzag").positions(64, 4).reshape(4, 16)
    keys_seen = (blocks + 1).sum(axis=1)
    assert len(set(keys_seen.tolist())) == 1
    contiguous = get_layout("contiguous").positions(64, 4).reshape(4, 16)
    assert len(set((contiguous + 1).sum(axis=1).tolist())) == 4


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_unpermute_undoes_permute(name, convert):
    layout = get_layout(name)
    x = convert(np.arange(2 * 24 * 3).reshape(2, 24, 3))
    moved = layout.permute(x, 4)
    np.testing.assert_array_equal(moved[:, :, 0], np.asarray(x)[:, layout.positions(24, 4), 0])
    np.testing.assert_array_equal(layout.unpermute(moved, 4), x)
    np.testing.assert_array_equal(layout.unpermute(layout.permute(x, 2, axis=0 - 2), 2, axis=1), x)


@pytest.mark.parametrize(("name", "length", "ring"), [("zigzag", 12, 4), ("contiguous", 10, 4), ("striped", 0, 2)])
def test_an_uneven_cut_is_refused_with_lengths_that_work(name, length, ring):
    layout = get_layout(name)
    with pytest.raises(ValueError, match=f"multiple of {layout.multiple(ring)}, got {length}; use"):
        layout.check(length, ring)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_length_that_does_not_divide_leaves_slots_out(name):
    layout = get_layout(name)
    positions = layout.positions(13, 4)
    np.testing.assert_array_equal(np.sort(positions), np.arange(13))
    whole = layout.positions(16, 4)
    np.testing.assert_array_equal(positions, whole[whole < 13])
    x = np.arange(13)[None]
    np.testing.assert_array_equal(layout.unpermute(layout.permute(x, 4), 4), x)


def test_a_dim_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"axis must be a dim of the array, and is 1; the array has shape \(16,\)"):
        get_layout("zigzag").permute(np.ones(16), ring=4)


def test_what_is_no_array_or_integer_is_refused():
    layout = get_layout("zigzag")
    with pytest.raises(ValueError, match="only arrays have an order of tokens; got list"):
        layout.permute([1, 2], ring=2)
    with pytest.raises(ValueError, match=r"the ring must be an integer of at least 1, got 2\.0"):
        layout.positions(8, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the sequence length must be an integer of at least 1, got True"):
        layout.positions(True, 2)


def test_unknown_names_and_empty_rings_are_refused():
    with pytest.raises(ValueError, match="unknown layout 'spiral'; the layouts are contiguous, zigzag, striped"):
        get_layout("spiral")
    with pytest.raises(ValueError, match="the ring must be at least 1, got 0"):
        get_layout("zigzag").check(8, 0)
    with pytest.raises(ValueError, match="the sequence length must be an integer of at least 1, got 0"):
        get_layout("zigzag").positions(0, 2)
