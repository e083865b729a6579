"""A node's signals: the first lets it leave in order, the second ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tllm.node.front_end.departure import Departure
from tllm.node.front_end.front_end import FrontEnd
from tllm.server.http.settings import ServerSettings

KINDS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    before = {kind: signal.getsignal(kind) for kind in KINDS}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize("kind", KINDS)
def test_one_signal_ends_the_work_which_goes_on_elsewhere(kind: signal.Signals) -> None:
    came = list[str]()

    def work() -> bool:
        try:
            signal.raise_signal(kind)
        except KeyboardInterrupt:
            came.append("interrupted")
            raise
        return True

    assert not Departure(None).run(work), "what starts commands again is to start this one again"
    assert came == ["interrupted"]


def test_the_first_is_for_the_run_that_the_node_coordinates() -> None:
    stopped = list[str]()

    def stop() -> bool:
        stopped.append("run")
        return True

    def work() -> bool:
        signal.raise_signal(signal.SIGINT)
        stopped.append("the node goes on until the run has ended")
        return False

    assert not Departure(None, stop).run(work)
    assert stopped == ["run", "the node goes on until the run has ended"]

    def work_on() -> bool:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return True

    with pytest.raises(KeyboardInterrupt):
        Departure(None, stop).run(work_on)


def test_a_second_one_is_an_interruption() -> None:
    def work() -> bool:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
        return True

    with pytest.raises(KeyboardInterrupt):
        Departure(None).run(work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_signal_is_enough_where_the_http_server_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: FrontEnd) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(FrontEnd, "_follow", fail)
    departure = Departure(ServerSettings(version=""))
    assert departure.front_end is not None
    departure.front_end._thread.join(20)
    seconds = 40.0

    def work() -> bool:
        signal.raise_signal(signal.SIGINT)
        time.sleep(seconds)
        return False

    start = time.monotonic()
    assert departure.run(work), "a server that has left in order"
    assert time.monotonic() - start < seconds
