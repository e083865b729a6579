"""Chooses what reads and encodes the rows of a job's task; and some rows of its files, spread over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.chat_labels import ChatEncoder
from tllm.training.data.dataset import Dataset, Documents
from tllm.training.data.encoder import Document, Encoder, check_known
from tllm.training.data.preference_rows import (
    OTHER,
    PairEncoder,
    ReplyEncoder,
    ScoredPairEncoder,
    UnpairedDataset,
    UnpairedEncoder,
)
from tllm.training.data.row_files.text_files import json_row
from tllm.training.data.row_forms import with_messages

READ_THROUGH = 8 << 20
"""Bytes of all files together that are read through. Of more, rows are looked for from places that lie evenly."""

Sampled = tuple[dict[str, Any], bool]
"""A row, and whether it is a document of its own."""


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
    """`rows` says what a row of the data is: "texts", "pairs", "scored_pairs", "unpaired" or "mismatched".

    Of a vocabulary of `vocab_size` no row may hold another id. An embedding would look up zeros for it.
    """
    encoder = _choose(rows, tokenizer, template, end)
    return encoder if vocab_size is None else _WithinVocabulary(encoder, vocab_size)


class _WithinVocabulary:
    """Another encoder's documents, whose ids are all of the vocabulary."""

    def __init__(self, encoder: RowEncoder, vocab_size: int) -> None:
        self._encoder, self._vocab_size = encoder, vocab_size
        self.key = encoder.key

    def encode(self, row: dict[str, Any], whole: bool = True) -> Document:
        return check_known(self._encoder.encode(row, whole), self._vocab_size)


def _choose(rows: str, tokenizer: Tokenizer | None, template: ChatTemplate | None, end: bool) -> RowEncoder:
    encoder = Encoder(tokenizer, template, end)
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


def count_rows(rows: str, files: Sequence[str], documents: Documents) -> int | None:
    """How many rows the files have; None for those that are too large to be read through for it."""
    if not _is_read_through(files):
        return None
    opened = open_rows(rows, files, documents)
    try:
        return len(opened)
    finally:
        opened.close()


def sampled_rows(rows: str, files: Sequence[str], documents: Documents, count: int) -> Iterator[Sampled] | None:
    """About `count` rows of what `rows` says, as `open_rows` gives them, or all where there are fewer; None for large
    files in which no row can be found without reading what is before it.

    Of a large file of lines those are read that follow on places as far from one another as can be: a long line draws
    no more of them than a short one, as it is the next that is read.
    """
    paths = [Path(name) for name in files]
    if _is_read_through(files):
        return _strided(rows, files, documents, count)
    if all(path.suffix in (".jsonl", ".ndjson") for path in paths):
        return _following(rows == "mismatched", paths, count)
    return None


def _is_read_through(files: Sequence[str]) -> bool:
    """Whether finding all rows reads little; a parquet file tells where they are."""
    return sum(path.stat().st_size for path in map(Path, files) if path.suffix != ".parquet") <= READ_THROUGH


def _strided(rows: str, files: Sequence[str], documents: Documents, count: int) -> Iterator[Sampled]:
    """Every so many rows one."""
    opened = open_rows(rows, files, documents)
    try:
        for number in range(0, len(opened), max(1, len(opened) // count)):
            yield opened.read(number), opened.whole(number)
    finally:
        opened.close()


def _following(mismatched: bool, paths: Sequence[Path], count: int) -> Iterator[Sampled]:
    """Rows that follow on places in the files; if `mismatched`, with the completion of the row before."""
    bounds = list(pairwise(accumulate((path.stat().st_size for path in paths), initial=0)))
    last = (-1, -1)
    for place in (bounds[-1][1] * number // count for number in range(count)):
        index = next(at for at, (_, stop) in enumerate(bounds) if place < stop)
        with paths[index].open("rb") as file:
            file.seek(place - bounds[index][0])
            if place > bounds[index][0]:
                file.readline()
            here = index, file.tell()
            found = list(islice(_rows(file, paths[index]), 1 + mismatched))
        if here == last or len(found) <= mismatched:  # in one long line, or behind the last
            continue
        last = here
        yield ({**found[1], OTHER: found[0].get("completion")} if mismatched else found[0]), True


def _rows(file: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    for line in file:
        if line.strip():
            yield with_messages(json_row(line, f"{path}, before byte {file.tell()}"))
