"""A file is there whole or not at all, with the rights that were asked for, whatever ends its writing."""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
from pathlib import Path

import pytest

from tllm.core.disk import given_path, open_files, print_line, private_file, whole_file, write_whole
from tllm.core.errors import AuthError, ConfigError


def test_it_takes_the_place_of_the_old_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "facts"
    path.write_bytes(b"old")
    with whole_file(path, 0o600) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"w")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["facts"]


@pytest.mark.parametrize("replaces", [True, False])
def test_all_of_it_is_on_the_disk_before_it_has_its_name(
    replaces: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, synced = tmp_path / "facts", list[tuple[bytes, bool]]()

    def sync(descriptor: int) -> None:
        [beside] = tmp_path.glob("facts.*")
        assert os.fstat(descriptor).st_ino == beside.stat().st_ino
        synced.append((beside.read_bytes(), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with whole_file(path, replaces=replaces) as file:
        file.write(b"new")
    assert synced == [(b"new", False)] and path.read_bytes() == b"new"
    with whole_file(tmp_path / "checked", synced=False) as file:
        file.write(b"by its hash")
    assert len(synced) == 1
    if not replaces:
        with pytest.raises(FileExistsError), whole_file(path, replaces=False) as file:
            file.write(b"newer")
    assert path.read_bytes() == b"new" and sorted(os.listdir(tmp_path)) == ["checked", "facts"]


def test_on_a_disk_without_hard_links_the_first_is_still_the_only_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as on FAT

    monkeypatch.setattr(os, "link", link)
    with private_file(tmp_path / "secret", replaces=False) as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), private_file(tmp_path / "secret", replaces=False) as file:
        file.write(b"second")
    assert (tmp_path / "secret").read_bytes() == b"first" and os.listdir(tmp_path) == ["secret"]


def test_nothing_is_written_of_a_secret_that_others_could_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode: opened(path, flags, 0o644))  # as on FAT
    with (
        pytest.raises(AuthError, match="secret would be readable by others") as found,
        private_file(tmp_path / "secret") as file,
    ):
        file.write(b"key")
    assert "umask=077" in found.value.hint and not os.listdir(tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "no space"), KeyboardInterrupt(), ValueError("no number")])
def test_what_was_begun_goes_when_it_fails(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "facts"
    path.write_bytes(b"old")

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["facts"]


def test_a_folder_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot write .*/file/facts: Not a directory|File exists") as found:
        write_whole(tmp_path / "file" / "facts", b"1", "HF_HOME")
    assert "HF_HOME" in found.value.hint


def test_a_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("serving")
    assert capsys.readouterr().out == "serving\n"


def test_a_full_disk_behind_stdout_is_told_once_in_the_log_without_the_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            print_line("tllm join HOST --token SECRET")
            print_line("serving")
        with pytest.raises(OSError, match="No space left"):
            full.close()
    print_line("and on")
    assert caplog.messages == [
        "lines for the operator cannot be written: No space left on device",
        "lines for the operator can be written again",
    ]


def test_a_path_that_is_given_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert given_path("a/../b") == tmp_path / "b"
    assert given_path("~/b") == tmp_path / "home" / "b"
    for text, why in {"~nobody-of-this-name/b": "home directory", "a\0b": "null byte"}.items():
        with pytest.raises(ConfigError, match=f"is no path here: .*{why}"):
            given_path(text)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "files"),
    [
        (1024, 1 << 20, 2000, 2000),
        (1024, 524_288, 1 << 20, 524_288),
        (4096, 4096, 5000, 4096),
        (9000, 9000, 5000, 5000),
        (256, resource.RLIM_INFINITY, 1 << 20, 10_240),  # as macOS has it, which refuses more
        (20_000, resource.RLIM_INFINITY, 1 << 20, 20_000),
    ],
)
def test_as_many_files_may_be_open_as_are_wanted_and_the_system_leaves(
    soft: int, hard: int, wanted: int, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert open_files(wanted) == files
    assert all(hard == known and soft <= raised for raised, known in asked)
