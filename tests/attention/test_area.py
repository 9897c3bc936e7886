"""How many scores each rank computes: counted while it does."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.attention import Mask, get_layout, ring_attention
from ringjax.attention.kernels import XlaKernel, xla

RING, SEQ, TILE = 4, 512, 8


class CountedKernel(XlaKernel):
    """An XlaKernel of its own, so that no program compiled without counting takes its place."""


@pytest.fixture
def area(monkeypatch, mesh_of):
    """A function that runs attention, forward or with its gradient, and returns the scores computed by rank."""
    found: Counter[int] = Counter()
    scores = xla._scores

    def counted(tiles, pair, products):
        jax.debug.callback(lambda rank: found.update({int(rank): products.size}), jax.lax.axis_index("seq"))
        return scores(tiles, pair, products)

    monkeypatch.setattr(xla, "_scores", counted)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, SEQ, 1, 4)), jnp.float32)

    def run(backward=False, segment_ids=None, seq=SEQ, **options):
        found.clear()
        attend = lambda x: ring_attention(  # noqa: E731
            x, x, x, mesh=mesh_of(RING), kernel=CountedKernel(TILE, TILE), segment_ids=segment_ids, **options
        )
        out = jax.grad(lambda x: attend(x).sum())(x[:, :seq]) if backward else attend(x[:, :seq])
        jax.block_until_ready(out)
        jax.effects_barrier()
        return [found[rank] for rank in range(RING)]

    return run


@pytest.mark.parametrize("backward", [False, True])
def test_zigzag_causal_is_even_and_near_the_half_square(area, backward):
    counts = area(backward, layout="zigzag")
    assert len(set(counts)) == 1
    ideal = SEQ * (SEQ + 1) / 2 * (2 if backward else 1)  # the gradient's own forward pass counts too
    assert ideal <= sum(counts) <= 1.02 * ideal


def has_branch(compiled) -> bool:
    return " conditional(" in compiled.as_text()


def test_zigzag_causal_has_no_branch(mesh_of):
    x = jnp.zeros((1, 64, 1, 4))
    attend = jax.jit(
        lambda x: ring_attention(x, x, x, mesh=mesh_of(RING), layout="zigzag", kernel=XlaKernel(TILE, TILE))
    )
    assert not has_branch(attend.lower(x).compile())
    contiguous = jax.jit(lambda x: ring_attention(x, x, x, mesh=mesh_of(RING), kernel=XlaKernel(TILE, TILE)))
    assert has_branch(contiguous.lower(x).compile())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_window_costs_in_proportion_to_itself(area, layout):
    # A row of tiles has at most two that are not wholly inside the window, and in stripes they are RING times wider.
    edge = 2 * TILE * (RING if layout == "striped" else 1)
    for window, backward in ((16, False), (32, True)):
        total = sum(area(backward, layout=layout, mask=Mask(window=window)))
        assert total <= SEQ * (window + edge) * (2 if backward else 1)


def test_documents_cost_their_own_squares(area):
    length = 64
    documents = np.repeat(np.arange(SEQ // length), length)[None]
    for layout in ("contiguous", "zigzag"):
        segments = get_layout(layout).permute(documents, RING)
        total = sum(area(layout=layout, segment_ids=segments, mask=Mask(causal=False)))
        assert total == SEQ * length
        total = sum(area(layout=layout, segment_ids=segments))
        assert total <= SEQ * (length / 2 + TILE)


def test_a_prefix_costs_what_it_shows(area):
    prefix = 64
    total = sum(area(layout="zigzag", mask=Mask(window=16, prefix_length=prefix)))
    assert total <= SEQ * (prefix + 16 + 2 * TILE)
