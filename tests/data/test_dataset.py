"""Batches: pure functions of the step, every row once an epoch, the same content in every layout."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest

from ringjax.attention.layout import get_layout
from ringjax.config import DataConfig
from ringjax.data import DataError, open_dataset

SEQ = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of 40 documents of 0 to 156 letters; no two rows are the same."""
    folder = tmp_path_factory.mktemp("corpus")
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), (40, 160))
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(letters[number, : 4 * number]))
    return folder


def opened(path, *, seed=0, layout="contiguous", ring=1, **settings):
    settings = {"seq_len": SEQ, "batch": 3, "eval_fraction": 0.2, **settings}
    return open_dataset(DataConfig(source="text", path=str(path), **settings), seed=seed, layout=layout, ring=ring)


def assert_same(one, other):
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def rows_of(batches):
    """The rows of some batches as one list, each a hashable value."""
    return [
        tuple(batch[name][b].tobytes() for name in sorted(batch))
        for batch in batches
        for b in range(len(batch["tokens"]))
    ]


def all_rows(split):
    return rows_of({name: leaf[None] for name, leaf in split.row(i).items()} for i in range(split.num_rows))


def test_both_sides_hold_the_corpus(corpus):
    data = opened(corpus)
    assert data.train.num_documents + data.eval.num_documents == 40
    # Each document is its bytes and one start token.
    assert data.train.num_tokens + data.eval.num_tokens == sum(4 * n + 1 for n in range(40))
    texts = {file.read_text() for file in corpus.iterdir()}
    for split in (data.train, data.eval):
        rows = [split.row(i) for i in range(split.num_rows)]
        stream = np.concatenate([row["tokens"][row["segment_ids"] >= 0] for row in rows])
        pieces = np.split(stream, np.flatnonzero(stream == data.tokenizer.bos_id))[1:]
        assert len(pieces) == split.num_documents
        assert {data.tokenizer.decode(piece) for piece in pieces} <= texts
        assert sum(row["weights"].sum() for row in rows) == split.num_tokens - split.num_documents


def test_batch_is_a_pure_function_of_the_step(corpus):
    one, other = opened(corpus).train, opened(corpus).train
    expected = [one.batch(step) for step in range(8)]
    for step in (7, 0, 3, 3, 6, 1):
        assert_same(other.batch(step), expected[step])
    for leaf in expected[0].values():
        assert leaf.shape == (3, SEQ)
        assert leaf.flags.c_contiguous


def test_batches_that_are_changed_in_place_leave_the_corpus_alone(corpus):
    train = opened(corpus).train
    before = train.batch(0)
    for leaf in train.batch(0).values():
        leaf[:] = 77
    assert_same(train.batch(0), before)


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_each_row_is_seen_once_an_epoch(corpus, batch):
    train = opened(corpus, batch=batch).train
    count = train.num_rows
    assert count > 100
    assert count % 4
    assert count % 7
    seen = rows_of(train.batch(step) for step in range(-(-3 * count // batch)))
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == sorted(all_rows(train))


def test_batch_size_only_groups(corpus):
    threes, fours = opened(corpus, batch=3).train, opened(corpus, batch=4).train
    assert rows_of(threes.batch(s) for s in range(40)) == rows_of(fours.batch(s) for s in range(30))


def test_epochs_and_seeds_differ_and_neighbouring_seeds_share_no_epoch(corpus):
    def epoch(seed, number):
        train = opened(corpus, batch=1, seed=seed).train
        index = {row: i for i, row in enumerate(all_rows(train))}
        assert len(index) == train.num_rows
        start = number * train.num_rows
        return [index[row] for row in rows_of(train.batch(start + i) for i in range(train.num_rows))]

    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1, 2)]
    natural = list(range(len(orders[0])))
    for one, other in itertools.combinations([natural, *orders], 2):
        agree = sum(a == b for a, b in zip(one, other, strict=False))
        assert agree < 10, "two permutations of more than 100 rows agree in about one place"


def test_documents_are_packed_in_an_order_of_the_seed(corpus):
    assert all_rows(opened(corpus, seed=0).train) != all_rows(opened(corpus, seed=1).train)
    opened(corpus, seed=2**80)


def test_held_out_rows_come_in_order_wrap_and_ignore_the_seed(corpus):
    held_out = opened(corpus).eval
    assert held_out.num_rows % 3
    expected = (all_rows(held_out) * 2)[: 3 * (held_out.num_rows // 3 + 2)]
    assert rows_of(held_out.batch(step) for step in range(held_out.num_rows // 3 + 2)) == expected
    assert_same(opened(corpus, seed=5).eval.batch(0), held_out.batch(0))


@pytest.mark.parametrize(("layout", "ring"), [*itertools.product(["contiguous", "zigzag", "striped"], [1, 2, 4])])
def test_a_layout_only_reorders_the_tokens_of_each_row(corpus, layout, ring):
    natural, data = opened(corpus), opened(corpus, layout=layout, ring=ring)
    order = get_layout(layout).positions(SEQ, ring)
    for step in (0, 5):
        for one, other in ((natural.train, data.train), (natural.eval, data.eval)):
            permuted, plain = other.batch(step), one.batch(step)
            assert_same(permuted, {name: leaf[:, order] for name, leaf in plain.items()})
            back = {name: get_layout(layout).unpermute(leaf, ring) for name, leaf in permuted.items()}
            assert_same(back, plain)


def test_batches_follow_one_another_from_any_step(corpus):
    train = opened(corpus, layout="zigzag", ring=2).train
    for start in (0, 1, 200):
        with_prefetch = train.batches(start)
        for step, batch in enumerate(itertools.islice(with_prefetch, 6), start):
            assert_same(batch, train.batch(step))
        with_prefetch.close()
    held_out = opened(corpus, batch=1).eval
    for step, batch in zip(range(held_out.num_rows + 2), held_out.batches(), strict=False):
        assert_same(batch, held_out.batch(step))


def test_two_iterators_and_random_access_do_not_disturb_each_other(corpus):
    train = opened(corpus).train
    one, other = train.batches(), train.batches(4)
    for step in range(5):
        assert_same(next(one), train.batch(step))
        assert_same(next(other), train.batch(4 + step))


def test_closing_ends_the_background_thread(corpus):
    def prefetching():
        return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]

    before = set(prefetching())
    batches = opened(corpus).train.batches()
    next(batches)
    started = set(prefetching()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_program_ends_while_batches_are_being_made(corpus):
    program = f"""
from ringjax.config import DataConfig
from ringjax.data import open_dataset
config = DataConfig(source="text", path={str(corpus)!r}, seq_len={SEQ}, eval_fraction=0.2)
batches = open_dataset(config, seed=0, layout="zigzag", ring=2).train.batches()
next(batches)
print("made one")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "made one\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_single_file_is_cut(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("abcdefghij" * 20)
    data = opened(file)
    assert (data.train.num_documents, data.eval.num_documents) == (1, 1)
    assert (data.train.num_tokens, data.eval.num_tokens) == (161, 41)


def test_a_corpus_without_text_is_refused(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"2 file\(s\).*empty"):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"1 file\(s\).*empty"):
        opened(tmp_path / "a.txt")


def test_a_corpus_shorter_than_a_sequence_is_refused_with_both_numbers(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("x" * 100)
    with pytest.raises(DataError, match=r"training.*data\.seq_len=90 .*has 81 tokens.*smaller data\.eval_fraction"):
        opened(file, seq_len=90)
    with pytest.raises(DataError, match=r"held-out.*data\.seq_len=22 .*has 21 tokens.*larger data\.eval_fraction"):
        opened(file, seq_len=22)
    assert opened(file, seq_len=21).eval.num_rows == 1


def test_a_length_the_layout_cannot_cut_is_refused(corpus):
    with pytest.raises(ValueError, match="multiple of 8, got 20"):
        opened(corpus, seq_len=20, layout="zigzag", ring=4)


def test_steps_before_the_first_are_refused(corpus):
    train = opened(corpus).train
    with pytest.raises(ValueError, match="got -1"):
        train.batch(-1)
    with pytest.raises(ValueError, match="got -1"):
        train.batches(-1)


def test_the_standard_library_is_ready_to_train_on():
    data = open_dataset(DataConfig(), seed=0, layout="zigzag", ring=4)
    assert data.train.num_tokens > 1_000_000
    assert data.eval.num_documents > 0
    # Enough held-out rows for the evaluation that is configured by default.
    assert data.eval.num_rows >= DataConfig().batch * DataConfig().eval_batches
    batch = data.train.batch(0)
    assert batch["tokens"].shape == (4, 4096)
    assert 0 <= batch["tokens"].min() <= batch["tokens"].max() < data.tokenizer.vocab_size
    assert batch["weights"].mean() > 0.9
