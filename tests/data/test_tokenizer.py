"""Bytes as tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.data import get_tokenizer


@settings(deadline=None, database=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_decode_leaves_out_what_is_not_a_byte_and_marks_broken_characters():
    tokenizer = get_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (257, 256)
    # 257 ... 319 exist as rows of an embedding that was rounded up to a multiple of 64.
    assert tokenizer.decode([256, 104, 300, 105, -1]) == "hi"
    assert tokenizer.decode(np.array([0xC3, 104])) == "�h"
    assert tokenizer.decode([]) == ""


def test_bytes_of_a_command_line_that_are_not_utf8_are_kept():
    assert get_tokenizer("bytes").encode("a\udcff").tolist() == [97, 255]


def test_an_unknown_tokenizer_is_named():
    with pytest.raises(ValueError, match=r"'words'.*bytes"):
        get_tokenizer("words")
