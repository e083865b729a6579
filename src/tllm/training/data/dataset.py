"""The rows of all files of a job, numbered through; and facts of the files by which a changed one is noticed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from tllm.core.errors import ConfigError, counted, nearest
from tllm.training.data.row_files.text_files import ParquetRows, json_lines, text_documents, text_stream
from tllm.training.data.row_files.whole_files import comma_separated, json_file, tab_separated
from tllm.training.data.row_forms import with_messages

Documents = Literal["blank_lines", "stream"]
"""What a text file is: documents with blank lines between them, or one text without borders."""

COMPRESSED = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")

FUNCTION_OF_ROWS = 'train_files = ["rows:training"], with a function training() in rows.py that returns the rows'
DATASET_OF_HUB = re.compile(r"[\w-]+/[\w-]+")


class DataFileFacts(msgspec.Struct, frozen=True):
    """What a file was when it was read through. The hash is of the content, unpacked, and alone says if it changed.

    Saves of earlier versions also have a time of change, which is passed over.
    """

    name: str
    rows: int
    size: int
    sha256: str


class RowFile(Protocol):
    """The rows of one file, numbered from 0. `whole`: each is a document, which begins and ends."""

    path: Path
    count: int
    whole: bool

    @property
    def sha256(self) -> str: ...
    def read(self, row: int) -> dict[str, Any]: ...
    def place(self, row: int) -> str: ...
    @property
    def close(self) -> Callable[[], object]: ...


READERS: dict[str, Callable[[Path], RowFile]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": comma_separated,
    ".tsv": tab_separated,
    ".txt": text_documents,
    ".parquet": ParquetRows,
}


class Dataset:
    """The rows of several files, numbered through in the order of the files."""

    def __init__(self, paths: Sequence[Path | str], documents: Documents = "blank_lines") -> None:
        if not paths:
            raise ConfigError("no file to train on", "give at least one in train_files")
        self._files = [_open(Path(path), documents) for path in paths]
        self.counts = [file.count for file in self._files]
        self._firsts = [0, *accumulate(self.counts)]

    @cached_property
    def facts(self) -> list[DataFileFacts]:
        """Of each file, by which a changed one is noticed."""
        return [_facts(file) for file in self._files]

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, row: int) -> dict[str, Any]:
        """A row; conversations that are written as ShareGPT's are messages."""
        file, own = self._find(row)
        content = file.read(own)
        try:
            return with_messages(content)
        except ConfigError as error:
            raise ConfigError(f"{file.place(own)}: {error.message}", error.hint) from error

    def place(self, row: int) -> str:
        """File and line of a row."""
        file, own = self._find(row)
        return file.place(own)

    def whole(self, row: int) -> bool:
        """Whether the row is a document of its own, not a part of a stream."""
        return self._find(row)[0].whole

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _find(self, row: int) -> tuple[RowFile, int]:
        assert 0 <= row < len(self)
        index = bisect_right(self._firsts, row) - 1
        return self._files[index], row - self._firsts[index]


def check_same(then: Sequence[DataFileFacts], now: Sequence[DataFileFacts]) -> None:
    """Refuse to go on over files that are not what they were: their row numbers would mean other rows."""
    if len(then) != len(now):
        raise ConfigError(
            f"the run read {counted(len(then), 'file')} and the job now names {len(now)}", "name the same files"
        )
    for old, new in zip(then, now, strict=True):
        if old.sha256 != new.sha256:
            raise ConfigError(
                f"{new.name} has changed since the run began: {counted(old.rows, 'row')} and {old.size} bytes then "
                f"(sha256 {old.sha256[:12]}), {counted(new.rows, 'row')} and {new.size} bytes now (sha256 "
                f"{new.sha256[:12]})",
                "bring the old file back: the run goes on with it, or ends if max_steps is the step of its last save, "
                "and a new run can begin with the weights in final/",
            )


def check_file(path: Path) -> None:
    """ConfigError where there is no such file, or one of which no rows are read. It is not opened."""
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not there"
        raise ConfigError(f"{path} is {kind}", _hint_for(path))
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix not in (COMPRESSED if path.suffix == ".gz" else READERS):
        known = [*READERS, *(f"{suffix}.gz" for suffix in COMPRESSED)]
        others = f"rows are read from {', '.join(READERS)}; a function of yours may read any other: {FUNCTION_OF_ROWS}"
        raise ConfigError(f"{path}: rows are not read from such a file", nearest("".join(path.suffixes), known, others))


def _hint_for(path: Path) -> str:
    """What a path that is no file was meant to be."""
    if path.is_dir():
        return f"name the files in it: {', '.join(sorted(found.name for found in path.iterdir())[:3])}"
    if set("*?[") & set(str(path)) and list(Path().glob(str(path))):
        return "patterns are not expanded: name each file"
    if DATASET_OF_HUB.fullmatch(str(path)):
        return f"a dataset of the Hugging Face hub comes from a function of yours: {FUNCTION_OF_ROWS}"
    return f"give paths of files, from {Path.cwd()} or from /"


def _open(path: Path, documents: Documents) -> RowFile:
    check_file(path)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    read = text_stream if plain.suffix == ".txt" and documents == "stream" else READERS[plain.suffix]
    opened = read(path)
    if opened.count == 0:
        raise ConfigError(f"{path} has no row", "leave it out")
    return opened


def _facts(file: RowFile) -> DataFileFacts:
    return DataFileFacts(file.path.name, file.count, file.path.stat().st_size, file.sha256)
