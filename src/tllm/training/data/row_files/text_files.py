"""Rows of JSONL, text and parquet files. A text file is read through once to find where rows begin, then row by row.

Parquet files are read by pyarrow, where it is installed (the extra `data`).
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError

Cut = Callable[[Iterator[bytes]], Iterator[tuple[int, int]]]
"""From a file's lines to (byte, line number) of each row's beginning."""

STREAM_BYTES = 1 << 16
"""A text taken as one stream is read in rows of whole lines, each at least so long but for the last."""


class LineRows:
    """Rows that are ranges of a file's bytes. `whole`: each is a document, which begins and ends."""

    def __init__(self, path: Path, cut: Cut, convert: Callable[[bytes], dict[str, Any]], whole: bool = True) -> None:
        self.path = path
        self.whole = whole
        self._convert = convert
        self._starts, self._lines = array("Q"), array("Q")
        digest = hashlib.sha256()
        with _opened(path) as file:
            if os.pread(file.fileno(), 2, 0) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise ConfigError(f"{path} is in UTF-16", "save it in UTF-8")
            for start, line in cut(_hashed(file, digest.update)):
                self._starts.append(start)
                self._lines.append(line)
            self._descriptor = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self.count = len(self._starts)
        self._starts.append(os.fstat(self._descriptor).st_size)
        self.sha256 = digest.hexdigest()

    def read(self, row: int) -> dict[str, Any]:
        """One row. It moves no place in the file, so that a thread may read ahead."""
        start, stop = self._starts[row], self._starts[row + 1]
        return _converted(os.pread(self._descriptor, stop - start, start), self._convert, lambda: self.place(row))

    def place(self, row: int) -> str:
        """Where a row stands, for messages; the first line is 1."""
        return f"{self.path}, line {self._lines[row]}"


def json_row(content: bytes, place: str) -> dict[str, Any]:
    """The object of one line. ConfigError for what is none, with its `place`."""
    return _converted(content, _json_row, lambda: place)


def _converted(content: bytes, convert: Callable[[bytes], dict[str, Any]], place: Callable[[], str]) -> dict[str, Any]:
    try:
        return convert(content.removeprefix(codecs.BOM_UTF8))
    except UNREADABLE as error:
        is_other = isinstance(error, msgspec.ValidationError)
        hint = 'each line is one object, as {"text": …}' if is_other else "repair this row or take it out"
        raise ConfigError(f"{place()}: {error}", hint) from error


def json_lines(path: Path) -> LineRows:
    """A JSON object a line."""
    return LineRows(path, _each_line, _json_row)


def text_documents(path: Path) -> LineRows:
    """Documents with blank lines between them."""
    return LineRows(path, _after_blank, _document_row)


def text_stream(path: Path) -> LineRows:
    """A text without borders, in rows of whole lines."""
    return LineRows(path, _runs, _stream_row, whole=False)


def _each_line(lines: Iterator[bytes]) -> Iterator[tuple[int, int]]:
    at = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield at, number
        at += len(line)


def _after_blank(lines: Iterator[bytes]) -> Iterator[tuple[int, int]]:
    at, blank = 0, True
    for number, line in enumerate(lines, 1):
        if line.strip():
            if blank:
                yield at, number
            blank = False
        else:
            blank = True
        at += len(line)


def _runs(lines: Iterator[bytes]) -> Iterator[tuple[int, int]]:
    at, start = 0, -STREAM_BYTES
    for number, line in enumerate(lines, 1):
        if at - start >= STREAM_BYTES:
            yield at, number
            start = at
        at += len(line)


_ROWS = msgspec.json.Decoder(dict[str, Any])


def _json_row(content: bytes) -> dict[str, Any]:
    return _ROWS.decode(content)


def _document_row(content: bytes) -> dict[str, Any]:
    return {"text": content.decode().rstrip()}


def _stream_row(content: bytes) -> dict[str, Any]:
    return {"text": content.decode()}


def _hashed(file: BinaryIO, update: Callable[[bytes], None]) -> Iterator[bytes]:
    for line in file:
        update(line)
        yield line


def _opened(path: Path) -> BinaryIO:
    """The file; a compressed one unpacked into a nameless file of the temporary folder, as gzip has no way to skip."""
    try:
        if path.suffix != ".gz":
            return path.open("rb")
        with tempfile.TemporaryFile() as plain, gzip.open(path) as packed:
            shutil.copyfileobj(packed, plain, 1 << 20)
            plain.seek(0)
            return os.fdopen(os.dup(plain.fileno()), "rb")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}", "is it whole, and has TMPDIR room for a .gz?") from error


INSTALL = "pip install 'together-llm[data]'"
GROUPS_KEPT = 4


class ParquetRows:
    """Rows of one parquet file; the row groups read last are kept, so order of the file is the fast order."""

    whole = True

    def __init__(self, path: Path) -> None:
        try:
            reader = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(f"{path} needs pyarrow, which is not installed", INSTALL) from error
        self.path = path
        try:
            self._file = reader.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own error for a torn file is a ValueError
            raise ConfigError(f"cannot read {path}: {error}", "check that the file is whole") from error
        metadata = self._file.metadata
        self.count: int = metadata.num_rows
        self._firsts = [0, *accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))]
        self._group = lru_cache(maxsize=GROUPS_KEPT)(self._file.read_row_group)

    @cached_property
    def sha256(self) -> str:
        """Of the whole file, which is read for it: rows alone are found without."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error}", "check that the file is whole") from error

    def read(self, row: int) -> dict[str, Any]:
        """One row; columns without a value are left out."""
        group = bisect_right(self._firsts, row) - 1
        try:
            (values,) = self._group(group).slice(row - self._firsts[group], 1).to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.place(row)}: {error}", "check that the file is whole") from error
        return {key: value for key, value in values.items() if value is not None}

    def place(self, row: int) -> str:
        """Where a row stands, for messages; the first row is 1."""
        return f"{self.path}, row {row + 1}"

    def close(self) -> None:
        self._file.close()
