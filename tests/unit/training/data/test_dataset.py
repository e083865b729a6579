"""Files of rows: found by bytes, read in any order, named by file and line where wrong, noticed when changed."""

from __future__ import annotations

import gzip
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tllm.core.errors import ConfigError
from tllm.training.data.dataset import Dataset, check_same
from tllm.training.data.row_files.text_files import STREAM_BYTES


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(rows: Dataset) -> list[str]:
    return [rows.read(i)["text"] for i in range(len(rows))]


def test_rows_are_numbered_through_all_files(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", '{"text":"a"}\n\n  \n{"text":"b"}\r\n{"text":"é"}')
    two = tmp_path / "two.jsonl.gz"
    two.write_bytes(gzip.compress(b'{"text":"c"}\n') + gzip.compress(b'{"text":"d"}\n'))
    three = written(tmp_path / "three.txt", "\n\nfirst\n  line\n\n \nsecond \n\n")
    rows = Dataset([one, two, three])
    assert rows.counts == [3, 2, 2]
    assert texts(rows) == ["a", "b", "é", "c", "d", "first\n  line", "second"]
    assert [rows.read(i)["text"] for i in (6, 0, 4, 2)] == ["second", "a", "d", "é"]
    assert rows.place(1) == f"{one}, line 4"
    assert rows.place(6) == f"{three}, line 7"
    rows.close()


@settings(max_examples=examples(50))
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=30))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, wanted: list[str]) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in wanted]
    rows = Dataset([written(tmp_path_factory.mktemp("rows") / "x.jsonl", "\n".join(lines))])
    assert texts(rows) == wanted
    rows.close()


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    assert texts(Dataset([written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text":"a"}')])) == ["a"]
    assert texts(Dataset([written(tmp_path / "a.txt", b"\xef\xbb\xbfa\n\nb")])) == ["a", "b"]


def test_a_stream_is_cut_at_lines_and_loses_nothing(tmp_path: Path) -> None:
    content = "".join(f"line {i} of a longer text\n" + "\n" * (i % 3) for i in range(9000))
    rows = Dataset([written(tmp_path / "x.txt", content)], "stream")
    parts = texts(rows)
    assert "".join(parts) == content
    assert len(parts) == len(content) // STREAM_BYTES + 1
    assert all(part.endswith("\n") and len(part) >= STREAM_BYTES for part in parts[:-1])
    assert not rows.whole(0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[1]", "line 2"),
        ('"text"', "line 2"),
        ('{"text": nan}', "line 2"),
        (b'{"text": "\xff"}', "line 2"),
        ('{"text": "\\ud800"}', "line 2"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, line: str | bytes, message: str) -> None:
    line = line if isinstance(line, bytes) else line.encode()
    rows = Dataset([written(tmp_path / "bad.jsonl", b'{"text":"good"}\n' + line + b"\n")])
    assert rows.read(0) == {"text": "good"}
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2: "):
        rows.read(1)


def test_a_file_that_is_one_list_is_said_to_want_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        Dataset([written(tmp_path / "a.jsonl", '[{"text": "a"}]')]).read(0)
    assert "each line is one object" in raised.value.hint


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.txt, line 3: .*utf-8"):
        texts(Dataset([written(tmp_path / "x.txt", b"good\n\n\xff\xfe\n")]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.yaml", b"a", "not read from such a file"),
        ("x.jsonl", '{"text": "a"}\n'.encode("utf-16"), "is in UTF-16"),
        ("x.parquet.gz", b"a", "not read from such a file"),
        ("x.jsonl", b"\n \n", "no row"),
        ("x.txt", b"", "no row"),
        ("x.txt.gz", b"plain", "cannot read"),
        ("x.jsonl.gz", gzip.compress(os.urandom(9999))[:5000], "cannot read"),
    ],
)
def test_files_that_hold_no_rows(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Dataset([written(tmp_path / name, content)])
    assert name in str(raised.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", "{}")
    with pytest.raises(ConfigError, match="is a folder") as raised:
        Dataset([tmp_path])
    assert raised.value.hint == "name the files in it: a.jsonl"
    with pytest.raises(ConfigError, match=r"gone\.jsonl is not there") as raised:
        Dataset([tmp_path / "gone.jsonl"])
    assert str(Path.cwd()) in raised.value.hint
    with pytest.raises(ConfigError, match="no file"):
        Dataset([])


def test_names_of_other_things_than_files_are_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.jsonl", "{}")
    for name, hint in [("*.jsonl", "name each file"), ("org/some-data", "rows:training"), ("b.yaml", str(tmp_path))]:
        with pytest.raises(ConfigError, match="is not there") as raised:
            Dataset([name])
        assert hint in raised.value.hint


def test_a_conversation_that_is_none_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "a"}\n{"conversations": [{"from": "me", "value": "a"}]}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: a turn of the conversation is from 'me'"):
        Dataset([path]).read(1)


def test_a_changed_file_is_noticed_and_a_copied_one_is_not(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"text":"a"}\n{"text":"b"}\n')
    then = Dataset([path]).facts
    os.utime(path, (1, 1))
    check_same(then, Dataset([path]).facts)
    (tmp_path / "there").mkdir()
    check_same(then, Dataset([written(tmp_path / "there" / "y.jsonl", path.read_bytes())]).facts)
    written(path, '{"text":"a"}\n{"text":"B"}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl has changed since .*2 rows"):
        check_same(then, Dataset([path]).facts)
    with pytest.raises(ConfigError, match="read 1 file and the job now names 2"):
        check_same(then, Dataset([path, path]).facts)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="needs pyarrow") as raised:
        Dataset([written(tmp_path / "x.parquet", b"PAR1")])
    assert "pip install 'together-llm[data]'" in raised.value.hint


def test_parquet_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = [{"text": f"text {i}", "input_ids": [i, i + 1]} for i in range(25)] + [{"text": "é", "input_ids": None}]
    parquet.write_table(arrow.Table.from_pylist(wanted), tmp_path / "x.parquet", row_group_size=4)
    rows = Dataset([tmp_path / "x.parquet"])
    assert [rows.read(i) for i in (3, 24, 0)] == [wanted[i] for i in (3, 24, 0)]
    assert rows.read(25) == {"text": "é"}
    assert rows.place(25).endswith("x.parquet, row 26")
    (tmp_path / "y.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"cannot read .*y\.parquet"):
        Dataset([tmp_path / "y.parquet"])
