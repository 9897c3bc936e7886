"""The decoder that is trained: its layers, its loss and what it costs."""

from ringjax.models.attention import Dropout
from ringjax.models.decoder import Decoder, count_parameters
from ringjax.models.flops import causal_keys, flops_per_token, keys_per_token
from ringjax.models.loss import token_loss_sum

__all__ = [
    "Decoder",
    "Dropout",
    "causal_keys",
    "count_parameters",
    "flops_per_token",
    "keys_per_token",
    "token_loss_sum",
]
