from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.commands.forked_command import ForkedServer
from tllm.node.sources.worker_forks import WorkerForks, WorkerProcess


@pytest.fixture(autouse=True)
def servers_that_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are no tests, which fork their servers to save the imports."""
    (popen,) = (kind for kind in ForkedServer.mro() if kind.__module__ == "subprocess")
    monkeypatch.setattr(subprocess, "Popen", popen)


def play(scene: Callable[[WorkerForks], Awaitable[None]]) -> None:
    """A scene that leaves no process."""

    async def limited() -> None:
        async with asyncio.timeout(200):
            forks = WorkerForks(threads=1)
            await scene(forks)
            await forks.close()

    asyncio.run(limited())
    assert wait_until_gone(descendants()) == []


async def forked(forks: WorkerForks, count: int) -> list[WorkerProcess]:
    workers = [await forks.start() for _ in range(count)]
    while any(worker.pid is None for worker in workers):
        await asyncio.sleep(0.01)
    return workers


def test_each_worker_has_its_own_files_group_and_end() -> None:
    """And one that takes the place of another imports nothing."""

    async def scene(forks: WorkerForks) -> None:
        killed, closed, kept = await forked(forks, 3)
        assert [os.getpgid(worker.pid) == worker.pid for worker in (killed, closed, kept) if worker.pid] == [True] * 3
        (server,) = set(descendants()) - {killed.pid, closed.pid, kept.pid}
        killed.kill()
        assert await killed.exit_code == -signal.SIGKILL
        closed.stdin.close()
        assert await closed.exit_code == 0
        assert await closed.stderr.read() == b"", "a later worker has not its stderr too"
        assert not kept.exit_code.done()
        kept.stdin.write(b"no settings\n")
        assert await kept.exit_code == 1
        assert b"DecodeError" in await kept.stderr.read()
        (second,) = await forked(forks, 1)
        assert set(descendants()) - {killed.pid, closed.pid, kept.pid} == {server, second.pid}
        second.stdin.close()
        assert await second.exit_code == 0

    play(scene)


def test_workers_are_suspended_and_go_on_and_none_outlives_its_starter_so() -> None:
    """Where a command is killed while it is suspended nobody tells its workers to go on: the system then ends them."""

    async def scene(forks: WorkerForks) -> None:
        workers = await forked(forks, 2)
        forks.signal(signal.SIGSTOP)
        assert [await state(worker, "T") for worker in workers] == ["T", "T"]
        forks.signal(signal.SIGCONT)
        assert [await state(worker, "S") for worker in workers] == ["S", "S"]
        forks.signal(signal.SIGSTOP)
        assert await state(workers[1], "T") == "T"
        (server,) = set(descendants()) - {worker.pid for worker in workers}
        os.kill(server, signal.SIGKILL)
        assert [await worker.exit_code for worker in workers] == [None, None]
        assert wait_until_gone([worker.pid for worker in workers if worker.pid]) == []

    play(scene)


async def state(worker: WorkerProcess, expected: str) -> str:
    """The process's state, once it is as expected or some time has passed."""
    for _ in range(1000):
        if (now := Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2][0]) == expected:
            break
        await asyncio.sleep(0.01)
    return now


def test_workers_outlive_the_server_and_another_is_started() -> None:
    async def scene(forks: WorkerForks) -> None:
        (old,) = await forked(forks, 1)
        (server,) = set(descendants()) - {old.pid}
        os.kill(server, signal.SIGKILL)
        assert await old.exit_code is None
        assert old.pid in descendants()
        (new,) = await forked(forks, 1)
        old.kill()
        assert old.pid is not None and wait_until_gone([old.pid]) == []
        new.stdin.close()
        assert await new.exit_code == 0

    play(scene)


def test_a_server_that_cannot_begin_leaves_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'tllm.node.fork_server' in sys.orig_argv:\n    os.write(2, b'no torch')\n    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scene(forks: WorkerForks) -> None:
        worker = await forks.start()
        assert await worker.exit_code is None
        assert worker.last_words == "no torch"
        assert await worker.stderr.read() == b""

    play(scene)


def test_what_was_asked_of_a_server_that_is_killed_ends() -> None:
    async def scene(forks: WorkerForks) -> None:
        workers = [await forks.start() for _ in range(2)]
        forks.kill()
        for worker in workers:
            worker.kill()
            assert await worker.exit_code is None

    play(scene)
