"""Some rows of large files, found without reading what lies between them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.training.data import choose_encoder as module
from tllm.training.data.choose_encoder import sampled_rows
from tllm.training.data.dataset import Dataset
from tllm.training.data.preference_rows import OTHER
from tllm.training.data.row_files import text_files


def written(path: Path, count: int, seed: int = 0, first: int = 0) -> list[dict[str, Any]]:
    """Rows of very unlike lengths, some with an empty line before them."""
    dice = random.Random(seed)
    rows = [{"text": "w " * dice.choice([1, 5, 400]), "completion": str(first + n)} for n in range(count)]
    path.write_text("".join("\n" * (n % 7 == 3) + json.dumps(row) + "\n" for n, row in enumerate(rows)))
    return rows


def found(files: list[Path], count: int, rows: str = "texts") -> list[dict[str, Any]]:
    some = sampled_rows(rows, [str(file) for file in files], "blank_lines", count)
    assert some is not None
    taken = list(some)
    assert all(whole for _, whole in taken)
    return [row for row, _ in taken]


def test_small_files_are_read_through(tmp_path: Path) -> None:
    rows = written(tmp_path / "a.jsonl", 50)
    assert found([tmp_path / "a.jsonl"], 10) == rows[::5]
    assert found([tmp_path / "a.jsonl"], 100) == rows


def test_of_large_files_few_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.ndjson")]
    rows = written(files[0], 3000) + written(files[1], 1000, 1, first=3000)
    monkeypatch.setattr(module, "READ_THROUGH", 0)
    monkeypatch.setattr(module, "open_rows", None)
    read = list[int]()
    taken = text_files.json_row

    def counted(content: bytes, place: str) -> dict[str, Any]:
        read.append(len(content))
        return taken(content, place)

    monkeypatch.setattr(module, "json_row", counted)
    some = found(files, 200)
    numbers = [int(row["completion"]) for row in some]
    assert all(row == rows[number] for row, number in zip(some, numbers, strict=True))
    assert numbers == sorted(set(numbers)) and 190 <= len(numbers) <= 200
    assert numbers[0] == 0 and numbers[-1] > 3900 and 130 <= sum(number < 3000 for number in numbers) <= 170
    assert sum(read) < 0.1 * sum(file.stat().st_size for file in files)
    lengths, whole = (fmean(len(row["text"]) for row in which) for which in (some, rows))
    assert lengths == pytest.approx(whole, rel=0.25), "a long line draws no more places than a short one"


def test_a_row_of_unpaired_replies_brings_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.jsonl", 500)
    monkeypatch.setattr(module, "READ_THROUGH", 0)
    some = found([tmp_path / "a.jsonl"], 40, "mismatched")
    assert len(some) > 30 and all(int(row[OTHER]) == int(row["completion"]) - 1 for row in some)


def test_one_line_in_which_many_places_lie_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a" * 10000, "b", "c")))
    monkeypatch.setattr(module, "READ_THROUGH", 0)
    assert [row["text"][0] for row in found([path], 20)] == ["a", "b"]


def test_what_is_no_row_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 20 + "no row\n")
    monkeypatch.setattr(module, "READ_THROUGH", 0)
    with pytest.raises(ConfigError, match=rf"a\.jsonl, before byte {path.stat().st_size}: "):
        found([path], 40)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_large_files_without_places_to_begin_at_are_not_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"x\n")
    monkeypatch.setattr(module, "READ_THROUGH", 1)
    assert sampled_rows("texts", [str(tmp_path / name)], "blank_lines", 10) is None


def test_rows_of_a_parquet_file_are_found_without_reading_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": [f"w{n}" for n in range(300)]}), path)
    facts = Dataset([path]).facts
    monkeypatch.setattr(module, "READ_THROUGH", 0)
    monkeypatch.setattr(text_files.hashlib, "file_digest", None)
    assert found([path], 3) == [{"text": f"w{n}"} for n in (0, 100, 200)]
    assert facts[0].rows == 300 and len(facts[0].sha256) == 64
