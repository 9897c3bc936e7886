"""The FLOP convention, counted by hand."""

import numpy as np
import pytest

from ringjax.config import ModelConfig
from ringjax.planner import flops_per_token, keys_per_token


def test_flops_of_a_small_decoder_by_hand():
    config = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=48)
    q_and_out, k_and_v, mlp, head = 2 * 32 * 32, 2 * 32 * 16, 3 * 32 * 48, 32 * 64
    forward = 2 * (2 * (q_and_out + k_and_v + mlp) + head) + 2 * (4 * 4 * 8 * 128 / 2)
    assert flops_per_token(config, 64, keys=128 / 2) == pytest.approx(3 * forward)


def test_packed_documents_count_by_their_own_lengths():
    assert keys_per_token(np.zeros((2, 8), np.int32)) == 4
    assert keys_per_token(np.array([[0, 0, 0, 0, 1, 1, -1, -1]])) == pytest.approx((16 + 4) / 2 / 8)
