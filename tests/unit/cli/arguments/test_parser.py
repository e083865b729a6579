from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tllm.cli.arguments.parser import (
    MOST,
    Parser,
    address,
    count,
    new_file,
    nonempty,
    port,
    positive,
    size,
    token_ids,
    user_path_text,
    whole,
)
from tllm.cli.main import COMMANDS, module_of


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (whole, "1", 1),
        (positive, "0.5", 0.5),
        (new_file, "no-such-file", Path("no-such-file")),
        (new_file, "n" * 300, Path("n" * 300)),  # of which whoever writes it says why not
        (count, "0", 0),
        (count, str(MOST), MOST),
        (port, "65535", 65535),
        (size, "4096", 4096),
        (size, "512M", 512 << 20),
        (size, "512MiB", 512 << 20),
        (size, "512MB", 512_000_000),
        (size, "1.5 GiB", 3 << 29),
        (size, "2TB", 2 * 10**12),
        (size, "2g", 2 << 30),
        (token_ids, "1, 2,3", (1, 2, 3)),
        (address, "lab-3:7000", ("lab-3", 7000)),
        (nonempty, "\n", "\n"),
        (user_path_text, "", ""),
        (user_path_text, "a/~", "a/~"),
        (address, "[::1]:7000", ("::1", 7000)),
    ],
)
def test_values(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (user_path_text, "~nobody-of-this-name/a"),
        (whole, "0"),
        *((positive, text) for text in ("0", "-1", "nan", "inf", "x", "")),
        (new_file, "/"),
        (new_file, "no-such-folder/file"),
        (whole, "-1"),
        (whole, "1.5"),
        (whole, "²"),
        (count, "x"),
        (count, str(MOST + 1)),
        (whole, "9" * 5000),
        (port, "65536"),
        (size, "0"),
        (size, "2 parsecs"),
        (size, "GiB"),
        (size, "99999999T"),
        (size, "9" * 400),
        (token_ids, ""),
        (token_ids, "1,,2"),
        (token_ids, "1,-2"),
        (token_ids, f"1,{MOST + 1}"),
        (address, "lab-3"),
        (address, ":7000"),
        (address, "lab-3:0"),
        (address, "lab-3:70000"),
        (nonempty, ""),
    ],
)
def test_refusals(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


@pytest.mark.parametrize("columns", ["1", "2", "80"])
def test_help_in_a_terminal_of_any_width(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "a few" in Parser("tllm", "Only a few words.").format_help()


@pytest.mark.parametrize("command", COMMANDS)
def test_paths_may_begin_at_home(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shells leave the `~` of `--cache-dir=~/pages` as it is, and `tllm join` made a folder that was called so."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = Parser(command, "")
    importlib.import_module(module_of(command)).add_arguments(parser)
    for action in parser._actions:
        if action.metavar in ("DIR", "FOLDER", "FILE", "OUT", "JOB") and action.help != argparse.SUPPRESS:
            assert callable(action.type) and str(action.type("~/a")) == str(tmp_path / "a"), action.dest
