"""ringjax: exact ring attention, and transformers trained with it on sequences no single device can hold."""

__version__ = "0.1.0"
