"""Clocks that do not go on by themselves, for what a slow machine would end otherwise."""

from __future__ import annotations

import pytest

from benchmarks.emulation.virtual_loop import VirtualLoop
from tests.unit.server import kit
from tllm.server.admission.token_bucket import TokenBucket


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kit.run` has a loop whose timers ring only once nothing else is left to do: a deadline comes after all that can
    be done before it, however long that takes. Nothing may wait for a thread."""
    monkeypatch.setattr(kit, "new_loop", VirtualLoop)


@pytest.fixture
def full_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token buckets begin full and are not filled again: what is left in them is what was not taken."""
    monkeypatch.setattr(TokenBucket, "level", property(lambda bucket: bucket._level))
