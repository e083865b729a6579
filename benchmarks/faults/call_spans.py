"""When calls began and ended, in several processes at once, by a file that all of them append to.

`time.monotonic` is one clock for all processes of a machine, so that calls of a worker and what its coordinator sees
lie on one line. A worker writes where `FILE` of its environment says.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = "TLLM_CALL_SPANS"


class Span(NamedTuple):
    """One call in the process `pid`: when it began and ended, and how long its thread computed meanwhile."""

    name: str
    pid: int
    began: float
    ended: float
    computed: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def spans(file: Path) -> list[Span]:
    """All calls that have ended, in the order in which they did."""
    return [Span(*json.loads(line)) for line in file.read_text().splitlines()]


def timed(call: Callable[..., Any], name: str, file: Path) -> Callable[..., Any]:
    """The same call, noted each time. A line as short as this is appended whole, whoever else writes."""

    @functools.wraps(call)
    def noted(*args: Any, **more: Any) -> Any:
        began, computed = time.monotonic(), time.thread_time()
        try:
            return call(*args, **more)
        finally:
            line = [name, os.getpid(), began, time.monotonic(), time.thread_time() - computed]
            with file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    return noted


def time_calls(places: Mapping[str, str]) -> None:
    """Time calls in this process: of each place (`module:function` or `module:Class.method`), by the name given."""
    for place, name in places.items():
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, timed(getattr(owner, last), name, Path(os.environ[FILE])))
