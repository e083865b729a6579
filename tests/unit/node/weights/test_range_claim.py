"""A part of a file is held by one at a time, whoever that is, and by nobody who has died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tllm.node.weights.range_claim import claimed


class Waited(Exception):
    """Somebody else holds it."""


def give_up() -> None:
    raise Waited


def test_only_parts_that_overlap_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with claimed(path, 32, 64, give_up):
        with claimed(path, 0, 32, give_up), claimed(path, 64, 96, give_up):
            pass
        for start, stop in ((0, 33), (63, 80), (40, 41), (0, 100)):
            with pytest.raises(Waited), claimed(path, start, stop, give_up):
                pass
    with claimed(path, 0, 100, give_up):
        pass
    assert path.read_bytes() == b"", "the file is as it was"


def test_a_program_that_died_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table"
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        with claimed(path, 0, 10, give_up):
            os.write(tell, b"1")
            signal.pause()
    assert os.read(told, 1) == b"1"
    with pytest.raises(Waited), claimed(path, 0, 10, give_up):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with claimed(path, 0, 10, give_up):
        pass
    for end in (told, tell):
        os.close(end)
