"""What is heard of a worker's process, whatever it prints."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tllm.node.sources.local_workers import LocalWorker
from tllm.node.sources.worker_forks import WorkerProcess


def test_a_line_that_does_not_end_is_read_and_the_workers_end_is_heard() -> None:
    """A progress bar may write megabytes without a line's end. If nobody read on, the worker would stand still."""
    ends = list[tuple[str, ...]]()

    async def hear() -> None:
        stderr = asyncio.StreamReader()
        process = WorkerProcess(SimpleNamespace(close=lambda: None), stderr)  # type: ignore[arg-type]
        worker = LocalWorker("local-0", process, lambda *told: ends.append(told))
        for _ in range(48):
            stderr.feed_data(b"x" * 65536)
            await asyncio.sleep(0)
        stderr.feed_data(b"\r50 %\r100 %\nits last words\n")
        stderr.feed_eof()
        process.exit_code.set_result(1)
        await worker.end()

    asyncio.run(hear())
    ((node, how, tail),) = ends
    assert (node, how) == ("local-0", "ended with exit code 1")
    assert tail.endswith("\n50 %\n100 %\nits last words")
