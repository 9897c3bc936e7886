"""Text to token ids and back."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike


class Tokenizer(ABC):
    """A vocabulary of `vocab_size` ids.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      bos_id: the id that starts every document; `encode` does not add it.
      unit: what a token stands for, in the unit of a loss: "byte" in nats/byte.
    """

    vocab_size: int
    bos_id: int
    unit: str

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, [tokens] int32, without `bos_id`."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """Return the text of some ids. Ids that are not text are left out, broken characters become U+FFFD."""


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: ids 0 to 255 are bytes, 256 starts a document.

    Example:
      >>> ByteTokenizer().encode("né")
      array([110, 195, 169], dtype=int32)
      >>> ByteTokenizer().decode([256, 110, 195, 169])
      'né'
    """

    vocab_size = 257
    bos_id = 256
    unit = "byte"

    def encode(self, text: str) -> np.ndarray:
        # surrogateescape: bytes of a command line that are not UTF-8 come back as they were typed.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        flat = np.asarray(ids, np.int64).reshape(-1)
        return flat[(flat >= 0) & (flat < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


TOKENIZERS: dict[str, type[Tokenizer]] = {"bytes": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`; "bytes" is the only one so far.

    Raises:
      ValueError: there is no such tokenizer.
    """
    if name not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {name!r}; the tokenizers are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()
