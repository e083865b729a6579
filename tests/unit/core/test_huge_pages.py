"""Who asks the C library for huge pages, and how."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tllm.core.memory import TUNABLE, VARIABLE, huge_page_environment

ASKED = f"{TUNABLE}=1"

PROGRAM = """
import os, sys
from pathlib import Path
from tllm.core.memory import VARIABLE, reexecute_with_huge_pages
print(os.getpid(), os.environ.get(VARIABLE, ""), *sys.argv[2:], flush=True)
reexecute_with_huge_pages(Path(sys.argv[1]))
print("begun", flush=True)
"""


@pytest.fixture
def on_request(tmp_path: Path) -> Path:
    policy = tmp_path / "enabled"
    policy.write_text("always [madvise] never\n")
    return policy


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", ASKED),
        ("glibc.malloc.check=1", f"glibc.malloc.check=1:{ASKED}"),
        (f"{TUNABLE}=0", f"{TUNABLE}=0"),
        (f"{TUNABLE}=2:glibc.malloc.check=1", f"{TUNABLE}=2:glibc.malloc.check=1"),
    ],
)
def test_what_a_user_has_set_stays(on_request: Path, given: str, found: str) -> None:
    before = {"PATH": "/bin"} | ({VARIABLE: given} if given else {})
    assert huge_page_environment(before, on_request) == {"PATH": "/bin", VARIABLE: found}


@pytest.mark.parametrize("said", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_nobody_asks_where_all_or_none_have_them(tmp_path: Path, said: str | None) -> None:
    if said is not None:
        (tmp_path / "enabled").write_text(said)
    assert huge_page_environment({"PATH": "/bin"}, tmp_path / "enabled") == {"PATH": "/bin"}


def test_a_program_begins_anew_once_in_the_same_process(on_request: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(on_request), "--word"],
        env=plain,
        check=True,
        capture_output=True,
        text=True,
    )
    first, second, end = done.stdout.splitlines()
    number = first.split()[0]
    assert first == f"{number}  --word" and second == f"{number} {ASKED} --word" and end == "begun"
