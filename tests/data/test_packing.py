"""Packing against a token-by-token oracle, on document lengths around every border."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringjax.data import PackedRows

VOCAB = 1000


def documents_of(lengths):
    """Documents whose tokens are all different (while they fit) and never 0."""
    ids = np.arange(sum(lengths)) % (VOCAB - 1) + 1
    return np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []


def oracle(documents, seq_len):
    """The rows, one token at a time, as lists."""
    stream = []  # (token, target, weight, document)
    for number, document in enumerate(documents):
        for place, token in enumerate(document):
            last = place == len(document) - 1
            stream.append((token, 0 if last else document[place + 1], 0.0 if last else 1.0, number))
    rows = []
    for start in range(0, len(stream), seq_len):
        row = {"tokens": [], "targets": [], "weights": [], "positions": [], "segment_ids": []}
        document, segment, position = None, -1, 0
        for token, target, weight, number in stream[start : start + seq_len]:
            if number != document:
                document, segment, position = number, segment + 1, 0
            for name, value in zip(row, (token, target, weight, position, segment), strict=True):
                row[name].append(value)
            position += 1
        for name, leaf in row.items():
            leaf.extend([-1 if name == "segment_ids" else 0] * (seq_len - len(leaf)))
        rows.append(row)
    return rows


@st.composite
def corpora(draw):
    """A row length, and document lengths that favour the borders of rows."""
    size = draw(st.integers(1, 9))
    near = st.sampled_from([0, 1, max(size - 1, 0), size, size + 1, 2 * size, 3 * size + 1])
    return size, draw(st.lists(near | st.integers(0, 4 * size), max_size=12))


@settings(deadline=None, database=None, max_examples=200)
@given(corpora())
@example((4, [4, 4]))  # borders on row borders
@example((4, [3, 5, 4]))  # one token before
@example((4, [5, 3, 1]))  # one token after
@example((4, [0, 17, 0, 0, 2, 0]))  # longer than many rows, nothing before, between and after
@example((1, [3, 1, 0, 2]))
@example((4, []))
@example((4, [0, 0]))
def test_rows_equal_a_token_by_token_packing(corpus):
    seq_len, lengths = corpus
    documents = documents_of(lengths)
    rows, expected = PackedRows(documents, seq_len, VOCAB), oracle(documents, seq_len)
    assert len(rows) == len(expected)
    assert rows.num_tokens == sum(lengths)
    for index, row in enumerate(expected):
        got = rows[index]
        assert list(got) == list(row)
        for name, leaf in row.items():
            np.testing.assert_array_equal(got[name], np.array(leaf), err_msg=f"row {index}, {name}")


@settings(deadline=None, database=None, max_examples=50)
@given(corpora())
def test_no_token_is_lost_and_every_pair_inside_a_document_counts_once(corpus):
    seq_len, lengths = corpus
    documents = documents_of(lengths)
    rows = PackedRows(documents, seq_len, VOCAB)
    packed = [rows[index] for index in range(len(rows))]
    weights = sum(row["weights"].sum() for row in packed)
    assert weights == sum(max(length - 1, 0) for length in lengths)
    tokens = [row["tokens"][row["segment_ids"] >= 0] for row in packed]
    np.testing.assert_array_equal(np.concatenate([np.zeros(0), *tokens]), np.concatenate([np.zeros(0), *documents]))
    for row in packed:
        assert not row["targets"][row["weights"] == 0].any()
        assert not row["weights"][row["segment_ids"] < 0].any()


def test_a_target_never_comes_from_the_next_document():
    documents = [np.full(length, number + 1) for number, length in enumerate([3, 1, 8, 4, 5])]
    rows = PackedRows(documents, 4, VOCAB)
    for index in range(len(rows)):
        row = rows[index]
        counted = row["weights"] > 0
        np.testing.assert_array_equal(row["targets"][counted], row["tokens"][counted])


def test_a_target_comes_from_the_next_row_of_the_same_document():
    rows = PackedRows([np.array([10, 11, 12, 13, 14])], 2, VOCAB)
    assert rows[0]["targets"].tolist() == [11, 12]
    assert rows[1]["targets"].tolist() == [13, 14]
    assert rows[1]["positions"].tolist() == [0, 1]  # a continued document starts again
    assert rows[2]["weights"].tolist() == [0, 0]


def test_leaf_types_do_not_depend_on_how_tokens_are_stored():
    for vocab_size in (200, 257, 100_000):
        row = PackedRows([np.array([1, vocab_size - 1, 2])], 4, vocab_size)[0]
        assert row["tokens"].tolist() == [1, vocab_size - 1, 2, 0]
        assert {name: leaf.dtype.name for name, leaf in row.items()} == {
            "tokens": "int32",
            "targets": "int32",
            "weights": "float32",
            "positions": "int32",
            "segment_ids": "int32",
        }


def test_rows_that_do_not_exist_are_refused():
    rows = PackedRows([np.array([1, 2, 3])], 2, VOCAB)
    with pytest.raises(IndexError, match="there are 2"):
        rows[2]
    with pytest.raises(IndexError):
        rows[-1]
    with pytest.raises(ValueError, match="seq_len=0"):
        PackedRows([], 0, VOCAB)
