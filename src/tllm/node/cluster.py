"""A whole cluster for the length of a block: the coordinator here, some workers here, others by join token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from tllm.cluster.health import SILENCE_SECONDS
from tllm.cluster.identity import Authority
from tllm.cluster.settings import EngineSettings
from tllm.cluster.wire import Address, spell
from tllm.engine.size import EngineConfig, limits_of
from tllm.ground.errors import ClusterError, ConfigError, TllmError
from tllm.node.coordinator import Choice, Coordinator, Tell, Work
from tllm.node.facts import cores, reachable, usable_memory
from tllm.node.lasting import Policy
from tllm.node.local import local_workers
from tllm.node.serving import Serving
from tllm.spec.config import read_config
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan

log = logging.getLogger("tllm.node")

LOOPBACK: Address = ("127.0.0.1", 0)
LINK_SECONDS = 30.0
LOCAL_SECONDS = 120.0  # for workers here to start and join

Invite = Callable[[str, str], None]
"""invite(HOST:PORT, token): what other machines need to join"""


def work_of(
    folder: Path,
    plan: str | Plan,
    config: EngineConfig,
    threads: int,
    link_seconds: float,
    allow_mixed: bool = False,
    lost_after: float = SILENCE_SECONDS,
) -> Work:
    """What to serve, checked as far as it can be before anything is started.

    A link waits for longer than a silent node is waited for, so that the node is named and not its neighbour.
    """
    raw = read_config(folder)
    spec = spec_from_config(raw)
    plan = Plan.parse(plan, spec.num_layers) if isinstance(plan, str) else plan
    plan.check(spec.num_layers)
    limits = limits_of(spec, plan, config)
    settings = EngineSettings(
        dtype=config.dtype or spec.dtype,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_speculative_tokens=limits.num_speculative_tokens,
        threads=threads,
        link_seconds=max(link_seconds, 2 * lost_after),
        narrow_wire=config.narrow_wire,
        wiring=config.wiring,
    )
    return Work(folder, json.dumps(raw), plan, settings, allow_mixed=allow_mixed, lost_after=lost_after)


@contextlib.asynccontextmanager
async def open_cluster(
    folder: Path,
    plan: str | Plan,
    config: EngineConfig | None = None,
    *,
    local: int | None = None,
    threads: int = 0,
    address: Address = LOOPBACK,
    authority: Path | None = None,
    allow_mixed: bool = False,
    invite: Invite | None = None,
    tell: Tell | None = None,
    join_seconds: float | None = None,
    link_seconds: float = LINK_SECONDS,
    policy: Policy = "replan",
    choice: Choice | None = None,
    lost_after: float = SILENCE_SECONDS,
    memory: int | None = None,
) -> AsyncIterator[Serving]:
    """A cluster that is ready to serve, ended with the block. Nodes run the same program as we do, or `allow_mixed`.

    `local` workers are started here, by default one for each rank; the plan's other ranks wait for nodes that join by
    what `invite` is told, for `join_seconds` (None: for ever). `address` is the control port's: other machines can
    join only if it is not a loopback one. `authority`: the folder that keeps the cluster's authority, else in memory.
    `policy` is for nodes that are lost: go on with what is left, or wait for others; `invite` is then called again.
    With a `choice` the plan only says for how many nodes to wait, and theirs is chosen when they are here. A node that
    is silent for `lost_after` seconds is lost. The workers here may together use `memory` bytes, all if None.
    """
    work = work_of(folder, plan, config or EngineConfig(), 0, link_seconds, allow_mixed, lost_after)
    nodes = local_names(work.plan, local)
    coordinator = Serving(work, await open_authority(authority), address, nodes, policy)
    coordinator.choice = choice
    async with forming(coordinator, nodes, reachable(address[0]), threads, invite, tell, join_seconds, memory):
        if coordinator.local is not None:
            coordinator.local.renew()
        yield coordinator


def local_names(plan: Plan, local: int | None) -> list[str]:
    """The nodes of this machine, which have the first ranks: as many as are asked for, else one for each rank."""
    local = plan.world_size if local is None else local
    if not 0 <= local <= plan.world_size:
        raise ConfigError(
            f"{local} local workers for a plan of {plan.world_size} ranks",
            f"start at most {plan.world_size}, or change the plan",
        )
    return [f"local-{place}" for place in range(local)]


async def open_authority(folder: Path | None) -> Authority:
    """The cluster's authority, from a folder that keeps it, or a new one in memory."""
    return await asyncio.to_thread(lambda: Authority.open(folder) if folder else Authority.create())


@contextlib.asynccontextmanager
async def forming(
    coordinator: Coordinator,
    local: list[str],
    host: str,
    threads: int,
    invite: Invite | None,
    tell: Tell | None,
    join_seconds: float | None,
    memory: int | None = None,
) -> AsyncIterator[None]:
    """Run the coordinator, with workers here by the names `local` and others that come, until the block ends.

    `host` is where all of them reach it. An error in the block is what the nodes then end with.
    """
    coordinator.door.own.update(local)
    ranks = coordinator.work.plan.world_size
    usable_memory(memory)  # too much shows before anything is started
    control: Address = (host, coordinator.door.port)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_running(coordinator))
        share = threads or max(1, cores() // max(len(local), 1))
        died = _Died(coordinator)
        if local:
            workers = local_workers(local, control, coordinator.token, share, died.tell, memory)
            coordinator.local = await stack.enter_async_context(workers)
        stack.enter_context(_ending(coordinator))
        if invite is not None:
            coordinator.invite = lambda uses: invite(spell(control), str(coordinator.token(uses)))
        if ranks > len(local):
            coordinator.invite(ranks - len(local))
        seconds = LOCAL_SECONDS if ranks == len(local) else join_seconds
        await died.unless(coordinator.form(seconds, tell))
        yield


@contextlib.contextmanager
def _ending(coordinator: Coordinator) -> Iterator[None]:
    """Tell the nodes to end with the block, and why if it fails."""
    try:
        yield
    except TllmError as error:
        coordinator.members.end(error.message)
        raise
    except BaseException:
        coordinator.members.end("the coordinator was interrupted")
        raise
    coordinator.members.end()


@contextlib.asynccontextmanager
async def _running(coordinator: Coordinator) -> AsyncIterator[None]:
    """Keep the coordinator's tasks; should they fail, so does every request, and leaving raises it."""
    task = asyncio.create_task(coordinator.run(), name="coordinator")

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            log.error("the coordinator failed", exc_info=done.exception())
            coordinator.fail(ClusterError(f"the coordinator failed: {done.exception()}"))

    task.add_done_callback(ended)
    try:
        yield
    finally:
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Died:
    """Hears of local workers that end, which is enough to give up a cluster that is still forming."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._first: asyncio.Future[TllmError] = asyncio.get_running_loop().create_future()

    def tell(self, node: str, how: str, tail: str) -> None:
        log.info("worker %s %s", node, how)
        if self._coordinator.members.is_ending:
            return
        log.warning("worker %s %s; its last words:\n%s", node, how, tail)
        last = tail.rpartition("\n")[2]
        if not self._first.done():
            self._first.set_result(ClusterError(f"worker {node} {how}", f"its last words: {last}" if last else ""))

    async def unless(self, forming: Coroutine[Any, Any, None]) -> None:
        """Let the cluster form, unless a local worker ends before it has."""
        task = asyncio.create_task(forming)
        try:
            await asyncio.wait((task, self._first), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # What the node itself has said tells more than that its process ended.
                await asyncio.wait((task,), timeout=1.0)
            if not task.done():
                raise self._first.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
