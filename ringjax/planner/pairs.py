"""How many pairs of a query and a key each device has at each step of a lap: exact, for any documents.

Blocks consist of affine runs of tokens, and how many pairs of two runs lie within a band of distances is a formula:
no pair is looked at. Letters: r the rank of the queries, R the ring, L tokens of a block.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ringjax.attention.layout import Layout, get_layout

Run = tuple[np.ndarray, int]  # position of the first token, [R]; how many there are


def hops(layout: str, ring: int, length: int, window: int | None) -> int:
    """Hops of a forward lap: R - 1, or fewer if a window ends before they do.

    Args:
      layout: where tokens sit.
      ring: R.
      length: L.
      window: tokens that one sees; None = all.
    """
    steps = _neighbours(get_layout(layout), ring, length, window)
    return ring - 1 if steps is None else steps


def pairs_of_steps(
    layout: str,
    ring: int,
    length: int,
    documents: Sequence[int] | None = None,
    window: int | None = None,
) -> np.ndarray:
    """Visible pairs, causal, of each rank at each step, [R, steps + 1]; step 0 is the own block.

    Args:
      layout: where tokens sit.
      ring: R.
      length: L, tokens of a block; R L are the row.
      documents: tokens of each document of a row, in order; what is left of the row is padding. None = one document.
      window: tokens that one sees, itself and those right before it; None = all.

    Raises:
      ValueError: the documents are longer than the row, or empty.
    """
    rule, total = get_layout(layout), ring * length
    lengths = [total] if documents is None else [int(n) for n in documents]
    if sum(lengths) > total or any(n < 1 for n in lengths):
        raise ValueError(f"documents must have at least one token each and at most {total} together; got {lengths}")
    rank = np.arange(ring)
    steps = hops(layout, ring, length, window)
    found = np.zeros((ring, steps + 1))
    size, stride = length // rule.chunks, rule.stride(ring)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    for step in range(steps + 1):
        for q_start, k_start in _meetings(rule, ring, length, window, rank, step):
            if stride > 1 or (q_start == k_start).all():
                documents_of_both = (starts[:, None], ends[:, None])
            else:
                # Of two runs that lie apart, one document at most has tokens in both: that of the first query.
                at = np.minimum(np.searchsorted(ends, q_start, side="right"), len(ends) - 1)
                documents_of_both = (starts[at][None], ends[at][None])
            found[:, step] += _pairs(q_start, k_start, size, stride, *documents_of_both, window).sum(axis=0)
    return found


def _neighbours(rule: Layout, ring: int, length: int, window: int | None) -> int | None:
    """Chunks away that the furthest visible key is, if blocks go to neighbours only; None = they go around."""
    if ring == 1 or window is None or rule.place(0, 0, ring) is None:
        return None
    steps = -(-(window - 1) // (length // rule.chunks))
    return steps if steps <= ring - 1 else None


def _meetings(
    rule: Layout, ring: int, length: int, window: int | None, rank: np.ndarray, step: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """First positions of the runs of queries and of keys that meet at a step, [R] each.

    Keys before the sequence stand for none.
    """
    if _neighbours(rule, ring, length, window) is None:
        source = (rank - step) % ring
        for q in range(rule.chunks):
            for k in range(rule.chunks):
                yield rule.chunk_start(q, rank, ring, length), rule.chunk_start(k, source, ring, length)
        return
    for chunk in range(rule.chunks):
        start = rule.chunk_start(chunk, rank, ring, length)
        yield start, start - step * (length // rule.chunks)


def _pairs(
    q_start: np.ndarray,
    k_start: np.ndarray,
    size: int,
    stride: int,
    start: np.ndarray,
    stop: np.ndarray,
    window: int | None,
) -> np.ndarray:
    """Pairs of two runs of `size` tokens that are in one document, [start, stop), and 0 <= q - k < window.

    Shapes: runs [R], documents [documents or 1, R or 1] -> [documents or 1, R].
    """
    lead = q_start - k_start  # q - k = stride (i - j) + lead
    q, k = _within(q_start, size, stride, start, stop), _within(k_start, size, stride, start, stop)
    seen = _count(q, k, -(lead // stride))
    if window is not None:
        seen = seen - _count(q, k, -((lead - window) // stride))
    return seen


def _within(
    first: np.ndarray, size: int, stride: int, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a run are in a document: first index, and one behind the last."""
    low, high = (np.clip(-((first - bound) // stride), 0, size) for bound in (start, stop))
    return low, np.maximum(low, high)


def _count(q: tuple[np.ndarray, np.ndarray], k: tuple[np.ndarray, np.ndarray], least: np.ndarray) -> np.ndarray:
    """Pairs of i in [a, b) and j in [c, d) with i - j >= least."""
    (a, b), (c, d) = q, k

    def triangle(n: np.ndarray) -> np.ndarray:
        n = np.maximum(n, 0).astype(np.float64)
        return n * (n + 1) / 2

    empty = (a >= b) | (c >= d)
    count = triangle(b - c - least) - triangle(a - c - least) - triangle(b - d - least) + triangle(a - d - least)
    return np.where(empty, 0.0, count)
