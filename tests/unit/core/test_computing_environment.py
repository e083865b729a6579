"""What libraries are told that read the environment at their start: huge pages, threads, what is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tllm.core import program
from tllm.core.program import PREPARED, THREADS, TUNABLE, VARIABLE, WAITING, computing_environment

ASKED = f"{TUNABLE}=1"

PROGRAM = """
import os, sys
from pathlib import Path
from tllm.core.program import VARIABLE, WAITING, reexecute_to_compute
read = [os.environ.get(name, "") for name in (VARIABLE, *WAITING)]
print(os.getpid(), *read, *sys.argv[2:], flush=True)
reexecute_to_compute(Path(sys.argv[1]))
print("begun", flush=True)
"""


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "group_threads", lambda: None)


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
    assert computing_environment(before, on_request) == {"PATH": "/bin", VARIABLE: found} | WAITING | PREPARED


@pytest.mark.parametrize("said", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_nobody_asks_where_all_or_none_have_them(tmp_path: Path, said: str | None) -> None:
    if said is not None:
        (tmp_path / "enabled").write_text(said)
    assert computing_environment({"PATH": "/bin"}, tmp_path / "enabled") == {"PATH": "/bin"} | WAITING | PREPARED


@pytest.mark.parametrize("said", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_wait_and_products_are_prepared_as_the_user_has_said(tmp_path: Path, said: dict[str, str]) -> None:
    said |= {"LRU_CACHE_CAPACITY": "9"}
    assert computing_environment(said, tmp_path / "enabled") == PREPARED | said


def test_there_are_as_many_threads_as_a_container_has_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "group_threads", lambda: 3)
    assert computing_environment({}, tmp_path / "enabled") == WAITING | PREPARED | {THREADS: "3"}
    assert computing_environment({THREADS: "5"}, tmp_path / "enabled") == WAITING | PREPARED | {THREADS: "5"}


def test_a_program_begins_anew_once_in_the_same_process(on_request: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in {VARIABLE, *WAITING, *PREPARED}}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(on_request), "--word"],
        env=plain,
        check=True,
        capture_output=True,
        text=True,
    )
    first, second, end = done.stdout.splitlines()
    number = first.split()[0]
    assert (
        first == f"{number}   --word"
        and second == f"{number} {ASKED} {WAITING['GOMP_SPINCOUNT']} --word"
        and end == "begun"
    )


@pytest.mark.parametrize(
    ("before", "found"),
    [("", WAITING | PREPARED), ("import torch", dict.fromkeys([*WAITING, *PREPARED]))],
    ids=["torch is not loaded", "torch is loaded"],
)
def test_a_users_program_computes_as_a_command_does_if_torch_has_not_read_otherwise(
    before: str, found: dict[str, str | None]
) -> None:
    program = f"import json, os\n{before}\nfrom tllm import LLM\nprint(json.dumps(dict(os.environ)))"
    plain = {name: value for name, value in os.environ.items() if name not in {VARIABLE, *WAITING, *PREPARED}}
    done = subprocess.run([sys.executable, "-c", program], env=plain, check=True, capture_output=True, text=True)
    environment = json.loads(done.stdout)
    assert {name: environment.get(name) for name in found} == found
    assert VARIABLE not in environment, "glibc has read it, and other programs that are started have not asked for it"
