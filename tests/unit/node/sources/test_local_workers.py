"""What is heard of a worker's process, whatever it prints."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from types import SimpleNamespace

import pytest

from tllm.node.sources.local_workers import LocalWorker
from tllm.node.sources.worker_forks import WorkerProcess, _Server


def test_whatever_a_worker_prints_is_read_its_warnings_are_told_and_its_end_is_heard(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A progress bar may write megabytes without a line's end. If nobody read on, the worker would stand still."""
    ends = list[tuple[str, ...]]()

    async def hear() -> None:
        stderr = asyncio.StreamReader()
        process = WorkerProcess(SimpleNamespace(close=lambda: None), stderr)  # type: ignore[arg-type]
        worker = LocalWorker("local-0", process, lambda *told: ends.append(told))
        for _ in range(48):
            stderr.feed_data(b"x" * 65536)
            await asyncio.sleep(0)
        stderr.feed_data(b"\nINFO tllm.node: ready\nWARNING tllm.engine: the disk is full\n")
        stderr.feed_data(b"PRINTED   of a reward function\n")
        stderr.feed_data(b"\r50 %\r100 %\nits last words\n")
        stderr.feed_eof()
        process.exit_code.set_result(1)
        await worker.end()

    with caplog.at_level(logging.INFO):
        asyncio.run(hear())
    assert [record.message for record in caplog.records] == ["local-0: tllm.engine: the disk is full"]
    assert capsys.readouterr().out == "  of a reward function\n"
    ((node, how, tail),) = ends
    assert (node, how) == ("local-0", "ended with exit code 1")
    assert tail.endswith("\n50 %\n100 %\nits last words")


@pytest.mark.parametrize(("is_killed", "words"), [(True, "was ended"), (False, "and so had the process that starts")])
def test_one_that_was_killed_with_all_others_is_not_said_to_have_lost_its_parent(is_killed: bool, words: str) -> None:
    """Where loading fails, the process that starts workers is killed first, and nobody tells how these ended."""
    ends = list[tuple[str, ...]]()

    async def hear() -> None:
        stderr = asyncio.StreamReader()
        process = WorkerProcess(SimpleNamespace(close=lambda: None), stderr)  # type: ignore[arg-type]
        worker = LocalWorker("local-0", process, lambda *told: ends.append(told))
        if is_killed:
            worker.kill()
        stderr.feed_eof()
        process.exit_code.set_result(None)
        await worker.end()

    asyncio.run(hear())
    ((_, how, _),) = ends
    assert words in how


def test_a_worker_that_is_asked_for_as_the_server_ends_is_given_up_too() -> None:
    """Nobody told its end, and so none was started in its place."""

    async def ask() -> None:
        control, theirs = socket.socketpair()
        theirs.close()
        server = _Server.__new__(_Server)
        server._control, server._asked, server.has_ended = control, deque(), True
        with control:
            worker = await server.fork()
        assert worker.exit_code.done()
        worker.stdin.close()

    asyncio.run(ask())
