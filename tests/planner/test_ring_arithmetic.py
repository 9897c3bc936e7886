"""Published figures of rings, from the planner's formulas."""

from dataclasses import replace

import numpy as np
import pytest

from ringjax.attention.layout import LAYOUTS, get_layout
from ringjax.planner import CHIPS, NETWORKS
from ringjax.planner.pairs import hops, pairs_of_steps
from ringjax.planner.ring import Block, break_even_tokens, gather_wins_from


@pytest.mark.parametrize(
    ("chip", "network", "alone", "grouped"),
    [
        ("a100", False, 2080, 260),
        ("h100", False, 4396, 549),
        ("h200", False, 4396, 549),
        ("h100", True, 39560, 4945),
        ("b200", False, 5000, 625),
        ("v4", False, 12222, 1528),
        ("v5e", False, 8756, 1094),
        ("v5p", False, 10200, 1275),
        ("v6e", False, 20400, 2550),
        ("tpu7x", False, 46140, 5768),
    ],
)
def test_break_even_of_a_causal_ring(chip, network, alone, grouped):
    """Peak rates, latency left out, as such tables are made."""
    found = CHIPS[chip]
    link = NETWORKS["400g"] if network else found.link
    peak = found.peak * found.devices  # the table is of chips
    assert break_even_tokens(peak, link.bandwidth, 1) == pytest.approx(alone, rel=1e-3)
    assert break_even_tokens(peak, link.bandwidth, 8) == pytest.approx(grouped, rel=1e-3)


@pytest.mark.parametrize(
    ("peak", "bandwidth", "tokens"),
    [
        (312e12, 300e9, 1.0e3),
        (312e12, 12.5e9, 24.5e3),
        (123e12, 112e9, 1.1e3),
        (275e12, 268e9, 1.0e3),
        (196e12, 186e9, 1.1e3),
    ],
)
def test_least_blocks_of_the_ring_attention_paper(peak, bandwidth, tokens):
    """arXiv:2310.01889, table 2: full blocks, multi-head, all links of a TPU together."""
    assert break_even_tokens(peak, bandwidth, 1, share=1.0) == pytest.approx(tokens, rel=0.06)


def test_hops_and_attention_that_others_measured():
    """Context-parallel inference (arXiv:2411.01783): 32,000 keys on each of 4 hosts, 16 heads over 1, D = 128."""
    keys = Block(tokens=32_000, heads=16, kv_heads=1, head_dim=128)
    assert keys.hop_bytes() == pytest.approx(16.38e6, rel=1e-3)
    assert 627e-6 <= keys.hop_bytes() / 26.1e9 <= 631e-6
    measured = replace(CHIPS["h100"], attention_rate=515e12)
    for tokens, flops, seconds in ((800, 2.10e11, 414e-6), (3200, 8.39e11, 1608e-6)):
        block = replace(keys, tokens=tokens)
        work = block.flops(1.0, backward=False, keys=32_000)
        assert work == pytest.approx(flops, rel=2e-3)
        assert work / measured.attention("bfloat16", backward=False) == pytest.approx(seconds, rel=0.03)


def test_break_even_is_where_work_and_hop_take_as_long():
    for backward in (False, True):
        for latency in (0.0, 2e-5):
            tokens = break_even_tokens(5e14, 5e10, 4, 0.5, backward, 2, latency, heads=32, head_dim=128)
            block = Block(round(tokens), 32, 8, 128)
            work = block.flops(0.5, backward) / 5e14
            assert work == pytest.approx(latency + block.hop_bytes(backward) / 5e10, rel=1e-3)


def test_backward_hides_later_than_forward():
    """c_bwd / c_fwd = (b + 4) 2 / (5 b)."""
    forward, backward = (break_even_tokens(1e14, 1e11, 1, backward=b) for b in (False, True))
    assert backward / forward == pytest.approx(6 / 5)


def test_contiguous_blocks_waste_half():
    """R / (2 R - 1) of the ideal, 53.3 % at R = 8: the busiest rank against the mean."""
    for ring, efficiency in ((2, 2 / 3), (8, 0.533), (33, 33 / 65)):
        work = pairs_of_steps("contiguous", ring, 4096).sum(axis=1)
        assert work.mean() / work.max() == pytest.approx(efficiency, abs=1e-3)


def test_balanced_layouts_share_evenly():
    for layout, least in (("zigzag", 1.0), ("striped", 0.99)):
        work = pairs_of_steps(layout, 8, 4096)
        assert work.sum(axis=1).min() / work.sum(axis=1).max() >= least
    # Of zigzag also at every step: nobody waits for anybody.
    assert np.ptp(pairs_of_steps("zigzag", 8, 4096)[:, 1:]) == 0


@pytest.mark.parametrize("group", [1, 7])
def test_a_ring_sends_more_than_ulysses(group):
    """By R / (g + 1), forward: 7 hops against four exchanges of 7 / 8 of q, k, v and out."""
    ring, block = 8, Block(1024, 8 * group, 8, 128)
    hops = (ring - 1) * block.hop_bytes()
    exchanges = (ring - 1) / ring * (2 * block.heads + 2 * block.kv_heads) * block.head_dim * block.tokens * 2
    assert hops / exchanges == pytest.approx(ring / (group + 1))


def test_where_an_exposed_gather_beats_a_hidden_ring():
    """g > 4 W / (k w), from the seconds of both: gather of all keys, and a merge at each step."""
    chip = CHIPS["h100"]
    for fused in (True, False):
        group = gather_wins_from(chip, chip.link, fused)
        block = Block(4096, 8000, round(8000 / group), 128)
        merges = 7 * block.merge_bytes(fused) / chip.memory_bandwidth
        gather = 7 * block.hop_bytes() / chip.link.bandwidth
        assert gather == pytest.approx(merges, rel=1e-3)
    assert gather_wins_from(chip, chip.link, True) == pytest.approx(3.72, abs=0.01)


SIZES = [(1, 12), (2, 4), (3, 6), (5, 12)]


@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_are_those_that_a_mask_shows(layout, window):
    for (ring, length), documents in [(size, packed) for size in SIZES for packed in (None, [1, 5, 3])]:
        if documents and sum(documents) > ring * length:
            continue
        found = pairs_of_steps(layout, ring, length, documents, window)
        lengths = documents or [ring * length]
        segments = np.repeat([*range(len(lengths)), -1], [*lengths, ring * length - sum(lengths)])
        position = get_layout(layout).positions(ring * length, ring)
        q, k = position[:, None], position[None]
        seen = (q >= k) & (segments[q] == segments[k]) & (segments[q] >= 0)
        seen &= q - k < window if window else True
        by_rank = seen.reshape(ring, length, ring, length).sum(axis=(1, 3))
        np.testing.assert_array_equal(found.sum(axis=1), by_rank.sum(axis=1))
        if hops(layout, ring, length, window) == ring - 1 and window is None:
            for step in range(ring):
                np.testing.assert_array_equal(
                    found[:, step], by_rank[np.arange(ring), (np.arange(ring) - step) % ring]
                )


def test_a_window_shortens_the_lap():
    assert hops("contiguous", 8, 1024, 1024) == 1
    assert hops("contiguous", 8, 1024, 1026) == 2
    assert hops("zigzag", 8, 1024, 513) == 1
    assert hops("striped", 8, 1024, 8) == 7
    assert hops("zigzag", 8, 1024, None) == 7


def test_documents_must_fit():
    with pytest.raises(ValueError, match="at most 8 together"):
        pairs_of_steps("zigzag", 2, 4, [5, 4])
    with pytest.raises(ValueError, match="at least one token"):
        pairs_of_steps("zigzag", 2, 4, [5, 0])
