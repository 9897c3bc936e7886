"""Batches: `batch(step)` is a pure function of the step, whoever asks and in whatever order."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain
import numpy as np

from ringjax.attention.layout import get_layout
from ringjax.config import DataConfig
from ringjax.data.packing import PackedRows, Row
from ringjax.data.sources import DataError, find_documents
from ringjax.data.split import TokenizedDocument, order_documents, split_documents
from ringjax.data.tokenizer import Tokenizer, get_tokenizer

Batch = dict[str, np.ndarray]

_READ_AHEAD = 2  # batches: one being used, one ready
_ENDLESS = 1 << 40  # steps: more than any run has, and small enough for Grain to count their rows
_EVAL_SEED = 0  # held-out documents keep one order, so that runs of different seeds are measured on the same rows


class Part(NamedTuple):
    """The places of a batch that a process holds.

    Attributes:
      rows: [b] int, which of the B rows, ascending.
      slots: [l] int, which of the S slots of a row in layout order, ascending.
    """

    rows: np.ndarray
    slots: np.ndarray


class Split:
    """One side of a corpus: rows of S tokens, and batches of B of them.

    Training rows are drawn without replacement: an epoch is a permutation of all rows that depends on the seed and
    the epoch, epochs follow one another without a gap, and B only decides how the sequence of rows is grouped (a
    batch may span two epochs). Held-out rows come in their own order; after the last one the first follows again.

    Attributes:
      num_documents: documents on this side.

    Args:
      rows: packed documents.
      num_documents: how many they are.
      batch_size: B.
      slots: [S] int, the natural position of every slot in layout order.
      seed: seed of the permutations; None keeps the order of the rows.
    """

    def __init__(self, rows: PackedRows, num_documents: int, batch_size: int, slots: np.ndarray, seed: int | None):
        self.num_documents = num_documents
        self._rows = rows
        self._slots = slots
        self._batch_size = batch_size
        order = grain.MapDataset.source(rows)
        if seed is not None:
            # Grain uses seed + epoch, so neighbouring seeds would share epochs: hash the seed first.
            order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._order = order.repeat()

    @property
    def num_rows(self) -> int:
        """Rows in one epoch."""
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        """Tokens in one epoch, document starts included, padding not."""
        return self._rows.num_tokens

    def row(self, index: int) -> Row:
        """Return one packed row, leaves [S] in natural order, neither shuffled nor permuted."""
        return self._rows[index]

    def batch(self, step: int, part: Part | None = None) -> Batch:
        """Return the batch of a step: the rows B * step ... B * step + B - 1 of the endless sequence of rows.

        Args:
          step: from 0.
          part: the places wanted; only their rows are read. None = the whole batch.

        Returns:
          tokens, targets, weights, positions and segment_ids as in `PackedRows`, each [B, S] in layout order, or of
          a part [b, l].
        """
        if step < 0:
            raise ValueError(f"steps start at 0, got {step}")
        indices = range(self._batch_size) if part is None else part.rows.tolist()
        slots = self._slots if part is None else self._slots[part.slots]
        rows: list[Any] = [self._order[step * self._batch_size + index] for index in indices]
        return {name: np.stack([row[name].take(slots) for row in rows]) for name in rows[0]}

    def batches(self, start_step: int = 0, part: Part | None = None) -> Generator[Batch, None, None]:
        """Yield batch(start_step), batch(start_step + 1), ... without end, made ahead in a background thread.

        The thread starts with the first batch asked for and ends when the generator is closed or forgotten.
        """
        if start_step < 0:
            raise ValueError(f"steps start at 0, got {start_step}")
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_READ_AHEAD)
        steps = grain.MapDataset.range(start_step, _ENDLESS).map(lambda step: self.batch(int(step), part))
        return _drain(steps.to_iter_dataset(options))


def _drain(dataset: grain.IterDataset) -> Generator[Batch, None, None]:
    """Yield what a dataset gives and stop its thread in the end."""
    with closing(iter(dataset)) as iterator:
        yield from iterator


@dataclass(frozen=True)
class Dataset:
    """A corpus, ready to train on.

    Attributes:
      tokenizer: made the tokens.
      train: documents to train on.
      eval: held-out documents.
    """

    tokenizer: Tokenizer
    train: Split
    eval: Split


def open_dataset(config: DataConfig, *, seed: int, layout: str, ring: int) -> Dataset:
    """Read, tokenize, split and pack a corpus.

    The tokens are kept in memory, two bytes each for bytes. Which rows a batch holds depends on the corpus, the
    seed, `seq_len` and B; the layout and the ring only reorder the tokens inside each row.

    Args:
      config: the data section.
      seed: order of the training documents and rows; the held-out side does not depend on it.
      layout: name of the layout that batches are put in.
      ring: R.

    Returns:
      The tokenizer and both splits.

    Raises:
      DataError: the corpus is missing, unreadable, not UTF-8, empty, or a side has less than one sequence.
      ValueError: the layout cannot cut `seq_len` over the ring.

    Example:
      >>> data = open_dataset(DataConfig(seq_len=1024, batch=2), seed=0, layout="zigzag", ring=4)
      >>> data.train.batch(0)["tokens"].shape
      (2, 1024)
    """
    get_layout(layout).check(config.seq_len, ring)
    slots = get_layout(layout).positions(config.seq_len, ring)
    tokenizer = get_tokenizer(config.tokenizer)
    train, held_out = split_documents(_tokenize(config, tokenizer), config.eval_fraction)

    def split(documents: Sequence[TokenizedDocument], order_seed: int, row_seed: int | None) -> Split:
        tokens = [document.tokens for document in order_documents(documents, order_seed)]
        rows = PackedRows(tokens, config.seq_len, tokenizer.vocab_size)
        return Split(rows, len(tokens), config.batch, slots, row_seed)

    dataset = Dataset(tokenizer, split(train, seed, seed), split(held_out, _EVAL_SEED, None))
    _check_size(dataset.train, config, "training", "a smaller data.eval_fraction")
    _check_size(dataset.eval, config, "held-out", "a larger data.eval_fraction")
    return dataset


def _tokenize(config: DataConfig, tokenizer: Tokenizer) -> list[TokenizedDocument]:
    """All documents as ids, each behind the token that starts a document."""
    documents = find_documents(config)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    start = np.array([tokenizer.bos_id], dtype)
    tokenized = [
        TokenizedDocument(document.name, np.concatenate([start, tokenizer.encode(document.read()).astype(dtype)]))
        for document in documents
    ]
    if all(len(document.tokens) == 1 for document in tokenized):
        raise DataError(
            f"the corpus has no text: {len(documents)} file(s) in {documents[0].path.parent}, all of them empty; "
            "set data.path to files with text"
        )
    return tokenized


def _check_size(split: Split, config: DataConfig, side: str, remedy: str) -> None:
    if split.num_tokens < config.seq_len:
        raise DataError(
            f"the {side} side of the corpus must fill one sequence of data.seq_len={config.seq_len} tokens, but "
            f"has {split.num_tokens} tokens in {split.num_documents} document(s); use a smaller data.seq_len, "
            f"{remedy}, or more text"
        )
