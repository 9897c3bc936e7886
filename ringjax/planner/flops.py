"""Model FLOPs: what the mathematics of the model costs, whatever the devices execute.

Convention, to be named beside every MFU: a multiply-add is 2 FLOPs; a causal mask counts as half of a full one,
packed documents by their own lengths; the backward pass is twice the forward pass; recomputation is not counted.
"""

from collections.abc import Sequence

import numpy as np

from ringjax.config import Config, ModelConfig


def keys_per_token(segment_ids: np.ndarray) -> float:
    """Mean number of keys that a token attends to, causal: sum over documents of n^2 / 2, over all tokens.

    Args:
      segment_ids: [B, S] int, the document of each token; negative tokens are padding and attend to nothing.

    Raises:
      ValueError: of another shape or kind, or empty.

    Example:
      >>> keys_per_token(np.array([[0, 0, 0, 0, 1, 1, -1, -1]]))  # (4^2 / 2 + 2^2 / 2) / 8
      1.25
    """
    segment_ids = np.asarray(segment_ids)
    if segment_ids.ndim != 2 or segment_ids.size == 0 or not np.issubdtype(segment_ids.dtype, np.integer):
        raise ValueError(
            f"segment_ids must be integers [B, S] with a token at least, got {segment_ids.dtype} of shape "
            f"{segment_ids.shape}"
        )
    pairs = 0.0
    for row in segment_ids:
        lengths = np.unique(row[row >= 0], return_counts=True)[1].astype(np.float64)
        pairs += float(np.sum(lengths**2)) / 2
    return pairs / segment_ids.size


def causal_keys(seq_len: int, window: int | None = None) -> float:
    """Mean number of keys that a token of one causal document attends to: S / 2, or less with a window.

    Args:
      seq_len: S.
      window: W, tokens that one sees, itself and those right before it. Of S tokens the i-th then sees min(i, W), in
        the mean W - W (W - 1) / (2 S); counted as S / 2, as without one, where that is less.

    Raises:
      ValueError: not whole numbers of at least 1.

    Example:
      >>> causal_keys(1000), causal_keys(1000, window=100)
      (500.0, 95.05)
    """
    for name, number in (("seq_len", seq_len), ("window", 1 if window is None else window)):
        if not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")
    if window is None or window >= seq_len:
        return seq_len / 2
    return min(seq_len / 2, window - window * (window - 1) / (2 * seq_len))


def keys_of_documents(seq_len: int, documents: Sequence[int] | None, window: int | None = None) -> float:
    """Mean number of keys that a token of a row attends to, causal.

    Args:
      seq_len: S.
      documents: tokens of each document of the row; what is left is padding. None = one document.
      window: as in `causal_keys`.
    """
    if documents is None:
        return causal_keys(seq_len, window)
    return sum(length * causal_keys(length, window) for length in documents) / seq_len


def flops_per_token(config: ModelConfig, vocab_size: int, keys: float) -> float:
    """Model FLOPs of one training step, forward and backward, per token.

    Args:
      config: the decoder.
      vocab_size: V.
      keys: mean number of keys a token attends to: S / 2 for one causal document a row, or `keys_per_token`.

    Returns:
      3 (2 P + 4 N H D keys), P the weights of all matrices that a token is multiplied with: all but the lookup.

    Example:
      >>> from ringjax.config import ModelConfig
      >>> config = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, mlp_dim=128)
      >>> flops_per_token(config, 256, causal_keys(512))  # 3 (2 * 90,112 weights + 131,072 of scores)
      933888.0
    """
    attention = config.dim * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 3 * config.dim * config.mlp_dim
    weights = config.layers * (attention + mlp) + config.dim * vocab_size
    scores = 4 * config.layers * config.heads * config.head_dim * keys
    return 3 * (2 * weights + scores)


def model_flops(config: Config, vocab_size: int, documents: Sequence[int] | None = None) -> float:
    """Model FLOPs of one step, on all devices, rows alike.

    Args:
      config: a whole run.
      vocab_size: V.
      documents: of each row, as in `keys_of_documents`.
    """
    data, windows = config.data, config.model.windows
    each = [keys_of_documents(data.seq_len, documents, window) for window in windows]
    keys = sum(each[layer % len(each)] for layer in range(config.model.layers)) / config.model.layers
    return data.batch * data.seq_len * flops_per_token(config.model, vocab_size, keys)
