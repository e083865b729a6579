"""Forms a cluster for the length of a `with` block: coordinator and some workers here, other nodes by join token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address, format_address
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.join_token import JoinToken
from tllm.core.errors import ClusterError, ConfigError, TllmError, counted
from tllm.core.tasks import end_tasks
from tllm.devices.choose import CPU, choose_device
from tllm.node.coordinator.cluster_options import ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.job import ClusterJob
from tllm.node.machine.process_facts import LOOPBACKS, cores, usable_memory
from tllm.node.sources.local_workers import LocalWorkers, WorkersRoom, local_workers
from tllm.node.sources.node_source import Invitation
from tllm.node.topology.numa_binding import NumaBinding, binding_of
from tllm.spec.plan import Plan

log = logging.getLogger("tllm.node")

LOCAL_SECONDS = 120.0  # for workers here to start and join


class FormableJob(ClusterJob, Protocol):
    """A job with the coordinator that it is given nodes by."""

    @property
    def coordinator(self) -> Coordinator: ...

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and bring every rank up. Raises what any of them fails with."""


def local_names(plan: Plan, local: int | None, beside: int = 0) -> list[str]:
    """The nodes of this machine, which have the first ranks: as many as are asked for, else one for each rank and each
    node that has a role `beside` the plan."""
    most = plan.world_size + beside
    local = most if local is None else local
    if not 0 <= local <= most:
        raise ConfigError(
            f"{counted(local, 'local worker')} for a plan of {counted(plan.world_size, 'rank')}",
            f"start at most {most}, or change the plan",
        )
    return [f"local-{place}" for place in range(local)]


async def open_authority(folder: Path | None, secret: bytes | None = None) -> Authority:
    """The cluster's authority, of a secret, from a folder that keeps it, or a new one in memory."""
    if secret is not None:
        return Authority.of_secret(secret)
    return await asyncio.to_thread(lambda: Authority.open(folder) if folder else Authority.create())


@contextlib.asynccontextmanager
async def forming(job: FormableJob, local: list[str], host: str, options: ClusterOptions) -> AsyncIterator[None]:
    """Run the coordinator of a job, with workers here by the names `local` and others that come, until the block ends.

    `host` is where all of them reach it. An error in the block is what the nodes then end with. `options.local`,
    `options.address` and `options.authority` are what `local` and the coordinator were made by.
    """
    coordinator = job.coordinator
    coordinator.control_server.own.update(local)
    wanted = coordinator.work.nodes
    check_local(len(local), options)
    control: Address = (host, coordinator.control_server.port)
    async with contextlib.AsyncExitStack() as stack:
        if options.source is not None:
            stack.callback(options.source.stop)
        running = await stack.enter_async_context(_running(job))
        share = options.threads or max(1, cores() // max(len(local), 1))
        early_end = _EarlyEnd(coordinator, running)
        if local:
            bound = stack.enter_context(binding_of(numa_binding(options), len(local), share))
            room = WorkersRoom(share, options.memory, coordinator.work.hub, options.device, bound, host)
            inside = LOOPBACKS.get(options.address[0], host), control[1]
            workers = LocalWorkers(inside, coordinator.token, early_end.on_end, room)
            coordinator.local = await stack.enter_async_context(local_workers(local, workers))
        stack.enter_context(_ending(coordinator))
        if options.secret is not None:
            coordinator.tokens.keep(JoinToken.of_secret(options.secret), time.time())
        joining = wanted - len(local) + options.spare_nodes
        if (source := options.source) is not None:
            coordinator.invitation = Invitation(source, format_address(control), joining)
            source.watch(early_end.fail)
        if joining:
            coordinator.invite(joining)
        seconds = LOCAL_SECONDS if wanted == len(local) else options.join_seconds
        await early_end.unless(job.form(seconds, options.on_progress))
        try:
            yield
        finally:
            if coordinator.replication is not None:  # while nodes are here, so that none takes over
                await coordinator.replication.end()


def numa_binding(options: ClusterOptions) -> NumaBinding:
    """How local workers are bound: by themselves only those that compute on processors. Another device has its own
    NUMA node, which is not looked for."""
    is_elsewhere = choose_device(options.device) != CPU
    return "none" if is_elsewhere and options.numa_binding == "auto" else options.numa_binding


def check_local(count: int, options: ClusterOptions) -> None:
    """ConfigError for devices or memory that this machine does not have, before anything is started."""
    devices = {choose_device(options.device, place) for place in range(count)}
    if devices == {CPU} or not devices:
        usable_memory(options.memory)


@contextlib.contextmanager
def _ending(coordinator: Coordinator) -> Iterator[None]:
    """Tell the nodes to end with the block, and why if it fails."""
    try:
        yield
    except TllmError as error:
        coordinator.members.end(error.message)
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        coordinator.members.is_unfinished = True
        coordinator.members.end("the first machine's command was ended by its operator")
        raise
    except BaseException:
        coordinator.members.end("the coordinator failed")
        raise
    coordinator.members.end()


@contextlib.asynccontextmanager
async def _running(job: FormableJob) -> AsyncIterator[asyncio.Task[None]]:
    """Run the coordinator's tasks; should they fail, so does the job, and leaving raises what they failed with."""
    task = asyncio.create_task(job.coordinator.run(), name="coordinator")

    def ended(done: asyncio.Task[None]) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        if isinstance(error, Deposed):
            log.error("%s", "; ".join(filter(None, (error.message, error.hint))))
            job.fail(error)
        else:
            log.error("the coordinator failed", exc_info=error)
            job.fail(ClusterError(f"the coordinator failed: {error}"))

    task.add_done_callback(ended)
    passed_over: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
    try:
        yield task
    except asyncio.CancelledError:  # told to end, which it does though it was deposed before
        passed_over += (Deposed,)
        raise
    finally:
        if not task.done():
            task.cancel()
        with contextlib.suppress(*passed_over):
            await task


class _EarlyEnd:
    """Is told of nodes that end or cannot come, which is enough to give up a cluster that is still forming; so is the
    end of `running`, the coordinator's tasks."""

    def __init__(self, coordinator: Coordinator, running: asyncio.Task[None]) -> None:
        self._coordinator, self._running = coordinator, running
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[TllmError] = self._loop.create_future()

    def on_end(self, node: str, how: str, tail: str) -> None:
        log.info("worker %s %s", node, how)
        if self._coordinator.members.is_ending:
            return
        log.warning("worker %s %s; its last words:\n%s", node, how, tail)
        last = tail.rpartition("\n")[2]
        self._give_up(ClusterError(f"worker {node} {how}", f"its last words: {last}" if last else ""))

    def fail(self, error: TllmError) -> None:
        """As `on_end`, of nodes that come from elsewhere, and from any thread."""
        self._loop.call_soon_threadsafe(self._failed, error)

    def _failed(self, error: TllmError) -> None:
        if not self._coordinator.members.is_ending:
            log.warning("%s", error.message)
            self._give_up(error)

    def _give_up(self, error: TllmError) -> None:
        if not self._first.done():
            self._first.set_result(error)

    async def unless(self, forming: Coroutine[Any, Any, None]) -> None:
        """Let the cluster form, unless a node ends before it has, or cannot come."""
        task = asyncio.create_task(forming)
        try:
            await asyncio.wait((task, self._first, self._running), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # What the node itself has said tells more than that its process ended.
                await asyncio.wait((task,), timeout=1.0)
            if not task.done():
                if self._running.done():
                    await self._running
                assert self._first.done(), "what the coordinator runs ends with an error, while the cluster forms"
                raise self._first.result()
            await task
        finally:
            await end_tasks(task)
