"""Documents in, batches out: sources, tokenizers, the held-out split, packing, and the layout permutation."""

from ringjax.data.dataset import Batch, Dataset, Part, Split, open_dataset
from ringjax.data.packing import PackedRows, Row
from ringjax.data.sources import DataError, Document, find_documents
from ringjax.data.tokenizer import ByteTokenizer, Tokenizer, get_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "DataError",
    "Dataset",
    "Document",
    "PackedRows",
    "Part",
    "Row",
    "Split",
    "Tokenizer",
    "find_documents",
    "get_tokenizer",
    "open_dataset",
]
