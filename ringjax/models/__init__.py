"""The decoder that is trained: its layers and its loss."""

from ringjax.models.attention import Dropout
from ringjax.models.decoder import Decoder, count_parameters
from ringjax.models.loss import token_loss_sum

__all__ = [
    "Decoder",
    "Dropout",
    "count_parameters",
    "token_loss_sum",
]
