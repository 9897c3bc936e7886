"""Text from a trained model."""

from ringjax.inference.sample import generate

__all__ = ["generate"]
