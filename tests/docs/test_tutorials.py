"""Every tutorial does what it says: its blocks are run in order, and what they print is held to the page.

Their `tllm` is forked; `test_the_quickstart` executes it, as a reader's shell does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs import page
from tests.docs.page import Block
from tests.docs.terminals import expected, find, follow
from tests.house.tree import ROOT
from tests.support.cluster import hosts
from tests.support.commands.command_door import CommandDoor

TUTORIALS = ROOT / "docs" / "tutorials"
OWN_NETWORK = "find-a-slow-machine"
"""The tutorial that makes a network slow: its machines are hosts of their own."""
SOAK = {"plan-before-you-buy"}
"""Followed by `make soak` alone; `make test` keeps those that serve, train and move a run."""


def tutorials() -> list[Any]:
    names = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem not in ("index", OWN_NETWORK))
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAK)) for name in names]


@pytest.mark.slow
@pytest.mark.timeout(480)  # half a minute at most where nothing else runs
@pytest.mark.parametrize("name", tutorials())
def test_tutorial(name: str, tmp_path: Path) -> None:
    with CommandDoor() as door:
        assert follow(TUTORIALS / f"{name}.md", tmp_path, door=door) > 0


@pytest.mark.netns
@pytest.mark.soak  # `test_doctor_hosts` finds a slow port
@pytest.mark.timeout(480)  # half a minute at most where nothing else runs
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "possible here")
def test_tutorial_over_a_network_of_its_own(tmp_path: Path) -> None:
    with hosts.Hosts(3) as network, CommandDoor() as door:
        assert follow(TUTORIALS / f"{OWN_NETWORK}.md", tmp_path, network, door) > 0


def test_nothing_in_a_tutorial_is_only_shown() -> None:
    faults = [
        f"{path.name}:{step.line}"
        for path in sorted(TUTORIALS.glob("*.md"))
        for step in page.read(path)
        if isinstance(step, Block) and "shown" in step.words
    ]
    assert not faults, faults


def test_numbers_stand_for_numbers_and_words_for_themselves() -> None:
    said = "rank  node\n   0  a   1.7 MiB\n   1  b   0.9 MiB\nserving tiny at http://127.0.0.1:9/v1\n"
    for text in ("rank node\n0 a 2.5 MiB\n…\nserving tiny at http://127.0.0.1:8000/v1", "1 b … MiB"):
        assert find(expected(text, exact=False), said) is not None
    for text in ("1 b 0.9 MiB\n0 a 1.7 MiB", "0 c 1.7 MiB", "serving small at"):
        assert find(expected(text, exact=False), said) is None
    assert find(expected("1 b 0.9 MiB", exact=True), said) is not None
    assert find(expected("1 b 0.8 MiB", exact=True), said) is None
