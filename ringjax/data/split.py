"""Which documents are held out, and in which order documents follow one another.

Both are hashes of a document's name alone, so that adding a document moves no other one, and neither depends on a
library's random generator.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenizedDocument:
    """A document as ids, [tokens], its start token included."""

    name: str
    tokens: np.ndarray


def name_hash(name: str, salt: str) -> float:
    """A number in [0, 1) that looks random and depends on the name and the salt only."""
    digest = hashlib.blake2b(salt.encode() + b"\0" + os.fsencode(name), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: exact in a float, and below 1


def split_documents(
    documents: Sequence[TokenizedDocument], eval_fraction: float
) -> tuple[list[TokenizedDocument], list[TokenizedDocument]]:
    """Divide documents into those to train on and those held out.

    A document is held out if the hash of its name is below `eval_fraction`, whatever other documents there are; but
    each side has at least one.
    A corpus of one document is cut instead: the last `eval_fraction` of its tokens, rounded up, are held out, and
    both parts start with its start token.

    Args:
      documents: each starts with its start token.
      eval_fraction: share that is held out, in (0, 1); of the documents on average, of the tokens if there is one.

    Returns:
      The training documents and the held-out documents.
    """
    if len(documents) == 1:
        return _cut(documents[0], eval_fraction)
    hashes = [name_hash(document.name, "eval") for document in documents]
    train = [document for document, value in zip(documents, hashes, strict=True) if value >= eval_fraction]
    held_out = [document for document, value in zip(documents, hashes, strict=True) if value < eval_fraction]
    # Few documents may all fall on one side: the one nearest to the border then goes to the other.
    if not held_out:
        held_out = [train.pop(min(range(len(train)), key=lambda i: name_hash(train[i].name, "eval")))]
    if not train:
        train = [held_out.pop(max(range(len(held_out)), key=lambda i: name_hash(held_out[i].name, "eval")))]
    return train, held_out


def _cut(
    document: TokenizedDocument, eval_fraction: float
) -> tuple[list[TokenizedDocument], list[TokenizedDocument]]:
    """Hold out the end of the only document."""
    start, text = document.tokens[:1], document.tokens[1:]
    kept = len(text) - math.ceil(len(text) * eval_fraction)
    tail = np.concatenate([start, text[kept:]])
    return (
        [TokenizedDocument(document.name, document.tokens[: 1 + kept])],
        [TokenizedDocument(document.name, tail)],
    )


def order_documents(documents: Sequence[TokenizedDocument], seed: int) -> list[TokenizedDocument]:
    """Put documents in an order that depends on the seed and on their names only."""
    return sorted(documents, key=lambda document: (name_hash(document.name, f"order {seed}"), document.name))
