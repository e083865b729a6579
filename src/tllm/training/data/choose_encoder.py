"""Chooses the encoder for the rows of a job's task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.chat_labels import ChatEncoder
from tllm.training.data.dataset import Dataset, Documents
from tllm.training.data.encoder import Document, Encoder
from tllm.training.data.preference_rows import (
    PairEncoder,
    ReplyEncoder,
    ScoredPairEncoder,
    UnpairedDataset,
    UnpairedEncoder,
)


class RowEncoder(Protocol):
    """Encodes rows; faults are `ConfigError`. `key` changes with whatever changes the ids of a row."""

    key: str

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document: ...


def choose_encoder(
    rows: str,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    end: bool,
    vocab_size: int | None,
) -> RowEncoder:
    """`rows` says what a row of the data is: "texts", "pairs", "scored_pairs", "unpaired" or "mismatched"."""
    encoder = Encoder(tokenizer, template, end, vocab_size)
    if rows == "texts":
        return encoder
    eos = [tokenizer.eos_id] if end and tokenizer and tokenizer.eos_id is not None else []
    replies = ReplyEncoder(tokenizer, ChatEncoder(template, tokenizer) if template and tokenizer else None, eos)
    match rows:
        case "pairs":
            return PairEncoder(replies, encoder.key)
        case "scored_pairs":
            return ScoredPairEncoder(replies, encoder.key)
        case "unpaired" | "mismatched":
            return UnpairedEncoder(replies, encoder.key, rows == "mismatched")
    raise AssertionError(f"nothing encodes rows of {rows}")


def open_rows(rows: str, files: Sequence[str], documents: Documents) -> Dataset:
    """The rows of the files, as `choose_encoder`'s encoder takes them."""
    return (UnpairedDataset if rows == "mismatched" else Dataset)(files, documents)
