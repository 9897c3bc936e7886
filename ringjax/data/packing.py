"""Documents packed into rows of equal length: nothing is cut away, and nothing crosses a document's border."""

from collections.abc import Sequence

import numpy as np

Row = dict[str, np.ndarray]


class PackedRows:
    """Documents laid end to end in one stream and cut into rows of S tokens.

    Row i is a pure function of i, made when it is asked for. Its leaves, all [S], in natural order:

    - tokens, int32.
    - targets, int32: the next token of the same document, also where that one stands in the next row.
    - weights, float32: 1, and 0 for the last token of a document (its target is 0) and for padding.
    - positions, int32: 0, 1, 2, ... from each document's start; a document that continues from the row before
      starts again at 0.
    - segment_ids, int32: 0, 1, 2, ... for the documents in the row, -1 for padding.

    The last row is padded with token 0. Documents without tokens leave no trace.

    Args:
      documents: ids of each document, [tokens], in the order in which they are packed.
      seq_len: S.
      vocab_size: ids are below it; the stream is kept in the smallest unsigned type that holds them.

    Example:
      >>> rows = PackedRows([np.array([7, 8, 9]), np.array([5])], seq_len=2, vocab_size=10)
      >>> len(rows), rows[1]["tokens"], rows[1]["segment_ids"], rows[1]["weights"]
      (2, array([9, 5], dtype=int32), array([0, 1], dtype=int32), array([0., 0.], dtype=float32))
    """

    def __init__(self, documents: Sequence[np.ndarray], seq_len: int, vocab_size: int):
        if seq_len < 1:
            raise ValueError(f"a row needs at least 1 token, got seq_len={seq_len}")
        dtype = np.min_scalar_type(vocab_size - 1)
        self.seq_len = seq_len
        self._tokens = np.concatenate([np.zeros(0, dtype), *(ids.astype(dtype) for ids in documents)])
        # Where documents start, and the stream's end; equal offsets are documents without tokens.
        self._borders = np.unique(np.cumsum([0, *(len(ids) for ids in documents)], dtype=np.int64))

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents; padding is not counted."""
        return len(self._tokens)

    def __len__(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} does not exist: there are {len(self)}")
        start = index * self.seq_len
        stop = min(start + self.seq_len, self.num_tokens)
        size = stop - start

        # The borders in (start, stop]: one on stop itself begins a document of no tokens in this row.
        first, last = np.searchsorted(self._borders, [start, stop], side="right")
        ends = self._borders[first:last] - start
        begins = np.concatenate([[0], ends])
        lengths = np.diff(begins, append=size)

        weights = np.ones(size, np.float32)
        weights[ends - 1] = 0
        following = self._tokens[start + 1 : stop + 1].astype(np.int32)
        targets = _padded(following, size, 0) * weights.astype(np.int32)
        row = {
            "tokens": (self._tokens[start:stop].astype(np.int32), 0),
            "targets": (targets, 0),
            "weights": (weights, 0),
            "positions": ((np.arange(size) - np.repeat(begins, lengths)).astype(np.int32), 0),
            "segment_ids": (np.repeat(np.arange(len(begins), dtype=np.int32), lengths), -1),
        }
        return {name: _padded(leaf, self.seq_len, fill) for name, (leaf, fill) in row.items()}


def _padded(leaf: np.ndarray, size: int, fill: int) -> np.ndarray:
    """Extend [tokens] to [size] with `fill`."""
    return np.pad(leaf, (0, size - len(leaf)), constant_values=fill)
