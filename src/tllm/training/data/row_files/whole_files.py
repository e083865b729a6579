"""Rows of files that are read as one and stay in memory: a list of JSON, tables of comma- or tab-separated values.

A `.json` file may also have an object a line, as others write it too; that is read as `.jsonl` is.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError, counted
from tllm.training.data.row_files.text_files import LineRows, json_lines, json_row

FIELD_CHARACTERS = 1 << 30
"""A field of a table may be so long; Python's own limit is 128 KiB."""


class RowsInMemory:
    """The rows of a file that was read as one; `convert` makes a row of each of `parts`, given where it stands."""

    whole = True

    def __init__(
        self, path: Path, content: bytes, parts: Sequence[Any], convert: Callable[[Any, str], dict[str, Any]]
    ) -> None:
        self.path = path
        self.count = len(parts)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._parts, self._convert = parts, convert

    def read(self, row: int) -> dict[str, Any]:
        """One row."""
        return self._convert(self._parts[row], self.place(row))

    def place(self, row: int) -> str:
        """Where a row stands, for messages; the first row is 1."""
        return f"{self.path}, row {row + 1}"

    def close(self) -> None:
        self._parts = ()


_LISTS = msgspec.json.Decoder(list[msgspec.Raw])


def json_file(path: Path) -> RowsInMemory | LineRows:
    """A list of objects, or an object a line. ConfigError for what is neither."""
    first = _first_line(path)
    if first.lstrip().startswith(b"["):
        content = _content(path)
        try:
            return RowsInMemory(path, content, _LISTS.decode(content), _object)
        except UNREADABLE as error:
            raise ConfigError(f"{path}: {error}", "it is one list of objects: see that the file is whole") from error
    try:
        json_row(first, str(path))
    except ConfigError as error:
        said = f"{path} is neither a list of objects nor an object a line"
        raise ConfigError(said, f"if its rows are a list below a key, write them out: jq -c '.KEY[]' {path}") from error
    return json_lines(path)


def _object(part: msgspec.Raw, place: str) -> dict[str, Any]:
    return json_row(bytes(part), place)


def comma_separated(path: Path) -> RowsInMemory:
    """A table whose first line names the columns; all values are texts."""
    return _table(path, ",")


def tab_separated(path: Path) -> RowsInMemory:
    """The same with tabs between the values."""
    return _table(path, "\t")


def _table(path: Path, delimiter: str) -> RowsInMemory:
    content = _content(path)
    csv.field_size_limit(FIELD_CHARACTERS)
    try:
        text = io.StringIO(content.decode(), newline="")
        lines = [line for line in csv.reader(text, delimiter=delimiter, strict=True) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}", "save it as CSV in UTF-8, texts with a line break in quotes") from error
    columns = lines[0] if lines else []

    def row(values: list[str], place: str) -> dict[str, Any]:
        if len(values) != len(columns):
            hint = "put values with a separator or a line break in quotes"
            raise ConfigError(
                f"{place}: {counted(len(values), 'value')}, and the first line names {counted(len(columns), 'column')}",
                hint,
            )
        return dict(zip(columns, values, strict=True))

    return RowsInMemory(path, content, lines[1:], row)


def _first_line(path: Path) -> bytes:
    """The first that is not blank, without a byte order mark; b"" where there is none."""
    with _read(path) as file:
        line = next((line for line in file if line.removeprefix(codecs.BOM_UTF8).strip()), b"")
    return _in_utf8(line, path)


def _content(path: Path) -> bytes:
    """All of a file, unpacked, without a byte order mark."""
    with _read(path) as file:
        return _in_utf8(file.read(), path)


def _in_utf8(content: bytes, path: Path) -> bytes:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path} is in UTF-16", "save it in UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


@contextmanager
def _read(path: Path) -> Iterator[io.BufferedIOBase]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}", "check that the file is whole") from error
