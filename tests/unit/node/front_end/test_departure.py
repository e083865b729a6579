"""A node's signals: the first lets it leave in order, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tllm.node.front_end.departure import Departure

KINDS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    before = {kind: signal.getsignal(kind) for kind in KINDS}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize("kind", KINDS)
def test_one_signal_ends_the_work_and_is_no_failure(kind: signal.Signals) -> None:
    came = list[str]()

    def work() -> None:
        try:
            signal.raise_signal(kind)
        except KeyboardInterrupt:
            came.append("interrupted")
            raise

    Departure(None).run(work)
    assert came == ["interrupted"]


def test_the_first_is_for_the_run_that_the_node_coordinates() -> None:
    stopped = list[str]()

    def stop() -> bool:
        stopped.append("run")
        return True

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        stopped.append("the node goes on until the run has ended")

    Departure(None, stop).run(work)
    assert stopped == ["run", "the node goes on until the run has ended"]

    def work_on() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Departure(None, stop).run(work_on)


def test_a_second_one_is_an_interruption() -> None:
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        Departure(None).run(work)
