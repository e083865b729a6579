"""Choices in a file: read by the next start, kept apart by machine, and not believed where they are damaged."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tllm.kernels import choice_file
from tllm.kernels.choice_file import ChoiceFile, MachineKey
from tllm.kernels.fastest import Choice

MACHINE = MachineKey("box", "0" * 16, "avx2 " + "1" * 16, "2.13.0", "AVX2", {}, "0.1.0", "2" * 16)
NAMES = ("linear", "kernel")
CHOICE = Choice("kernel", {"linear": 2e-3, "kernel": 1e-3})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "autotune"


def opened(folder: Path, **other: Any) -> ChoiceFile:
    return ChoiceFile(folder, msgspec.structs.replace(MACHINE, **other))


def test_what_one_start_keeps_the_next_one_finds(folder: Path) -> None:
    first = opened(folder)
    assert first.get("product", "rows=1", NAMES) is None
    first.put("product", "rows=1", CHOICE)
    first.put("attention", "rows=1", CHOICE._replace(name="linear"))
    second = opened(folder)
    assert second.get("product", "rows=1", NAMES) == CHOICE
    assert second.get("attention", "rows=1", NAMES) == CHOICE._replace(name="linear")
    assert second.get("product", "rows=2", NAMES) is None
    assert second.count() == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("field", MACHINE.__struct_fields__)
def test_another_machine_or_program_finds_nothing(folder: Path, field: str, caplog: pytest.LogCaptureFixture) -> None:
    opened(folder).put("product", "rows=1", CHOICE)
    value = {"ATEN_CPU_CAPABILITY": "default"} if field == "settings" else "another"
    with caplog.at_level("DEBUG"):
        assert opened(folder, **{field: value}).get("product", "rows=1", NAMES) is None
    assert "no choices are kept for this machine and program" in caplog.text
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_file_that_says_another_machine_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = opened(folder, processor="another")
    other.put("product", "rows=1", CHOICE)
    mine = opened(folder)
    other.path.rename(mine.path)
    with caplog.at_level("DEBUG"):
        assert mine.get("product", "rows=1", NAMES) is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"] and "another machine" in caplog.text


def test_a_choice_among_other_ways_is_not_taken(folder: Path) -> None:
    file = opened(folder)
    file.put("product", "rows=1", CHOICE)
    assert file.get("product", "rows=1", ("linear",)) is None
    assert file.get("product", "rows=1", (*NAMES, "W x^T")) is None
    file.put("product", "rows=1", CHOICE._replace(name="rm -rf"))
    assert opened(folder).get("product", "rows=1", NAMES) is None


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        found = json.loads(path.read_bytes())
        change(found)
        path.write_text(json.dumps(found))

    return spoil


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def too_many(found: dict[str, Any]) -> None:
    kept = found["choices"]["product"]["rows=1"]
    found["choices"]["product"] = {f"rows={i}": kept for i in range(choice_file.MOST_CHOICES + 1)}


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda path: path.write_bytes(b"") and None, "truncated"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-20]) and None, "truncated"),
    "no JSON": (lambda path: path.write_bytes(b"\x80\x04K*.") and None, "malformed"),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000) and None, "is not read"),
    "unknown key": (changed(lambda found: found.update(run="sh")), "run"),
    "a time that is none": (changed(lambda f: f["choices"]["product"]["rows=1"]["seconds"].update(kernel=-1)), ">= 0"),
    "a time without end": (changed(lambda f: f["choices"]["product"]["rows=1"]["seconds"].update(kernel=1e999)), "is"),
    "a long name": (changed(lambda f: f["choices"]["product"]["rows=1"].update(winner="x" * 301)), "length"),
    "too many": (changed(too_many), "more than 2000 choices"),
    "too long": (lambda path: path.write_bytes(b" " * (choice_file.MOST_BYTES + 1)) and None, "more than 2097152"),
    "open to others": (lambda path: path.chmod(0o622), "mode 0622"),
    "a link": (linked, "symbolic links"),
    "a pipe": (a_pipe, "no file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line_and_is_written_anew(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, why = DAMAGED[name]
    opened(folder).put("product", "rows=1", CHOICE)
    file = opened(folder)
    spoil(file.path)
    assert file.get("product", "rows=1", NAMES) is None
    assert file.get("product", "rows=2", NAMES) is None
    assert len(caplog.records) == 1 and "measured anew" in caplog.text and why in caplog.text
    file.put("product", "rows=2", CHOICE)
    caplog.clear()
    after = opened(folder)
    assert after.get("product", "rows=2", NAMES) == CHOICE and after.count() == 1
    assert not caplog.records and not after.path.is_symlink()


def test_a_folder_that_cannot_be_written_to_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("in the way")
    file = opened(folder)
    with caplog.at_level("INFO"):
        for rows in range(3):
            file.put("product", f"rows={rows}", CHOICE)
    assert [record.levelname for record in caplog.records if "is not kept in" in record.message] == ["INFO"]


def test_several_that_write_at_once_lose_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own object and lock file descriptor, as processes have, and waits for the lock however long."""
    monkeypatch.setattr(choice_file, "LOCK_TRIES", 10**6)
    files = [opened(folder) for _ in range(4)]

    def write(number: int) -> None:
        for i in range(10):
            files[number].put("product", f"rows={number} {i}", CHOICE)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened(folder).count() == 40
    assert files[0].get("product", "rows=3 9", NAMES) == CHOICE, "written by another meanwhile"
    assert {path.suffix for path in folder.iterdir()} == {".json", ""}, "no part is left"


def test_a_lock_that_another_keeps_holds_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_file, "LOCK_TRIES", 2)
    file = opened(folder)
    file.put("product", "rows=1", CHOICE)
    with choice_file._locked(folder / choice_file.LOCK):
        file.put("product", "rows=2", CHOICE)
    assert opened(folder).count() == 2


def test_both_choices_and_files_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_file, "MOST_CHOICES", 3)
    monkeypatch.setattr(choice_file, "MOST_FILES", 2)
    for program in "abc":
        file = opened(folder, program=program)
        for rows in range(5):
            file.put("product", f"rows={rows}", CHOICE)
        os.utime(file.path, (ord(program), ord(program)))
    assert [file.get("product", f"rows={rows}", NAMES) for rows in range(5)] == [None, None, CHOICE, CHOICE, CHOICE]
    file.put("product", "rows=5", CHOICE)
    assert len(list(folder.glob("*.json"))) == 2
    assert opened(folder, program="a").count() == 0, "the oldest is gone"
