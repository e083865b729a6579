"""Files of rows that are read as one: lists of JSON, and tables of comma- or tab-separated values."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tllm.core.errors import ConfigError
from tllm.training.data.dataset import Dataset, check_same

ROWS = [{"text": "a, é"}, {"prompt": "b\n\nc", "completion": '"d"'}]


def rows_of(path: Path) -> list[dict[str, object]]:
    rows = Dataset([path])
    try:
        return [rows.read(number) for number in range(len(rows))]
    finally:
        rows.close()


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\r\n "])
def test_a_list_of_objects_is_rows(tmp_path: Path, indent: int | None, before: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(before + json.dumps(ROWS, indent=indent).encode())
    assert rows_of(path) == ROWS
    packed = tmp_path / "rows.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert rows_of(packed) == ROWS


def test_a_json_file_may_have_an_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n" + "".join(json.dumps(row) + "\r\n" for row in ROWS))
    assert rows_of(path) == ROWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}', "rows.json: "),
        ('{\n  "data": [1]\n}', "neither a list of objects nor an object a line"),
        ("[]", "has no row"),
        ("", "neither a list"),
        ("[1]", "rows.json, row 1: Expected `object`, got `int`"),
    ],
)
def test_json_that_holds_no_rows_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        rows_of(path)
    path.write_text(content, "utf-16")
    with pytest.raises(ConfigError, match=r"rows\.json is in UTF-16"):
        rows_of(path)


def test_a_table_has_a_row_a_line_by_the_names_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"a, b","c\r\n""d"""\r\n\r\ne,\r\n')
    assert rows_of(path) == [{"prompt": "a, b", "completion": 'c\r\n"d"'}, {"prompt": "e", "completion": ""}]
    tabs = tmp_path / "rows.tsv.gz"
    tabs.write_bytes(gzip.compress(b"text\tn\na, b\t3\n"))
    assert rows_of(tabs) == [{"text": "a, b", "n": "3"}]


def test_a_long_text_fits_into_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "x" * 300_000)
    assert len(str(rows_of(path)[0]["text"])) == 300_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", r"rows\.csv, row 2: 3 values, and the first line names 2 columns"),
        (b'a,b\n1,"2\n', r"rows\.csv: unexpected end"),
        (b"a\n\xff\n", r"rows\.csv: .*utf-8"),
        (b"a,b\n", "has no row"),
        ("a\nb\n".encode("utf-16"), "is in UTF-16"),
    ],
)
def test_a_table_that_holds_no_rows_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        rows_of(path)


def test_a_changed_table_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\na\n")
    then = Dataset([path]).facts
    check_same(then, Dataset([path]).facts)
    path.write_text("text\nb\n")
    with pytest.raises(ConfigError, match=r"rows\.csv has changed"):
        check_same(then, Dataset([path]).facts)
