"""The held-out side: decided by names, never empty without a word."""

import numpy as np
import pytest

from ringjax.data.split import TokenizedDocument, order_documents, split_documents


def documents(count, prefix="doc"):
    return [TokenizedDocument(f"{prefix}/{number}.txt", np.array([256, number])) for number in range(count)]


def names(side):
    return [document.name for document in side]


def test_every_document_is_on_one_side_in_about_the_wanted_share():
    train, held_out = split_documents(documents(4000), 0.1)
    assert sorted(names(train) + names(held_out)) == sorted(names(documents(4000)))
    assert 300 < len(held_out) < 500


def test_adding_documents_moves_none():
    _, before = split_documents(documents(200), 0.1)
    _, after = split_documents(documents(100, "new") + documents(200), 0.1)
    assert [name for name in names(after) if name.startswith("doc")] == names(before)


def test_a_larger_fraction_keeps_what_was_held_out():
    _, small = split_documents(documents(200), 0.05)
    _, large = split_documents(documents(200), 0.3)
    assert set(names(small)) < set(names(large))


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
def test_each_side_has_at_least_one_document(fraction):
    train, held_out = split_documents(documents(5), fraction)
    assert sorted(names(train) + names(held_out)) == sorted(names(documents(5)))
    assert len(held_out if fraction < 0.5 else train) == 1


def test_the_end_of_an_only_document_is_held_out():
    only = TokenizedDocument("book.txt", np.array([256, *range(10)]))
    (train,), (held_out,) = split_documents([only], 0.25)
    assert train.tokens.tolist() == [256, *range(7)]
    assert held_out.tokens.tolist() == [256, 7, 8, 9]


def test_order_depends_on_the_seed_and_keeps_neighbours_when_documents_come_and_go():
    one, again, other = (names(order_documents(documents(50), seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(one) == sorted(other)
    shuffled_input = names(order_documents(documents(50)[::-1], 1))
    assert shuffled_input == one
    fewer = names(order_documents(documents(50)[:20], 1))
    assert fewer == [name for name in one if name in fewer]
    order_documents(documents(2), 2**300)  # any seed will do
