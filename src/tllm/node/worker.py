"""The worker process: joins a cluster, takes the role that it is assigned and runs it. It ends with the coordinator or
on a failure."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from tllm.cluster.certificates import Identity, node_name
from tllm.cluster.connection import listen, own_address
from tllm.cluster.heartbeat import describe_rank
from tllm.cluster.join import join, locate
from tllm.cluster.join_token import JoinToken
from tllm.cluster.messages import (
    AdapterReady,
    Assign,
    DeviceFacts,
    Heartbeat,
    Load,
    LoadAdapter,
    Loaded,
    Progress,
    RoleTaken,
    Start,
    Started,
    Stop,
    TakeRole,
)
from tllm.cluster.settings import (
    AnswerSettings,
    DoctorSettings,
    EngineSettings,
    Settings,
    SurveySettings,
    TrainSettings,
    VerifySettings,
)
from tllm.cluster.tls import data_server
from tllm.comm.links.connect import LinkHello, Listener
from tllm.core.errors import AuthError, ClusterError, FrameError, LinkError, TllmError
from tllm.core.memory import keep_freed_memory, private_bytes, rss_bytes
from tllm.core.stacks import show_stacks_on_signal
from tllm.devices.choose import CPU, choose_device, compute_on
from tllm.devices.memory import device_name, held_memory, peak_memory, usable_device_memory
from tllm.engine.driver import Command
from tllm.node.answering.answering_rank import AnsweringRank
from tllm.node.answering.answering_role import AnsweringRole
from tllm.node.machine.memory_limit import keep_to, out_of_memory
from tllm.node.machine.printed_lines import PrintedLines
from tllm.node.machine.process_facts import cores, facts_of, usable_memory
from tllm.node.roles.control import Control, WorkerOrder
from tllm.node.roles.controlled_node import Beside, HttpDoor, ReplicaHost
from tllm.node.roles.doctor_rank import DoctorRank
from tllm.node.roles.role import MakeRole, RankRole, Role, check_speaker
from tllm.node.roles.serving_rank import ServingRank
from tllm.node.roles.survey_rank import SurveyRank
from tllm.node.roles.training_rank import TrainingRank, check_no_code
from tllm.node.roles.verify_rank import VerifyRank
from tllm.node.topology.numa_binding import bind
from tllm.node.weights.chunk_fetcher import ChunkFetcher
from tllm.node.weights.chunk_server import ChunkServer
from tllm.planner.cost.cache_room import RUNTIME_BYTES
from tllm.weights.chunk_cache import ChunkCache

log = logging.getLogger("tllm.node")

PROGRESS_SECONDS = 0.1

ROLES: Mapping[type[Settings], MakeRole] = {
    EngineSettings: ServingRank,
    TrainSettings: TrainingRank,
    DoctorSettings: DoctorRank,
    SurveySettings: SurveyRank,
    VerifySettings: VerifyRank,
    AnswerSettings: AnsweringRank,
}
"""The role that an assignment makes, by the type of its settings."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know. `listen` is the host of its data wire: by default that which faces the coordinator.

    `wait`: seconds for which a coordinator that does not listen yet is waited for; `rejoin`: those for which one that
    is lost is looked for again. Weights that come from other nodes are kept in the folder `weights_cache`,
    `weights_cache_bytes` of them at most. Pages of the KV cache, if they are to be on disk, are kept in `cache_dir`,
    `cache_dir_size` bytes of them, instead of in the coordinator's folder. `memory`: bytes that this node may use;
    `is_shared`: together with the other nodes of this machine that are told the same.
    `runs_own_code`: a command of the user's has started it, so that it may load functions that the user's job names.
    `ends_with_starter`: it is a process that `main` ends with the coordinator's, whichever way that goes.
    `device`: what it computes on, which without an index is that of its `place` among the processes of this machine.
    `processors`: those that it is bound to, none if it may run on any.
    """

    host: str
    port: int
    token: str
    node: str = ""
    listen: str = ""
    threads: int = 0
    wait: float = 0.0
    rejoin: float = 0.0
    weights_cache: str = ""
    weights_cache_bytes: int = 0
    memory: int | None = None
    cache_dir: str = ""
    cache_dir_size: int = 0
    is_shared: bool = False
    runs_own_code: bool = False
    ends_with_starter: bool = False
    device: str = "cpu"
    place: int = 0
    processors: tuple[int, ...] = ()


class HttpServer(HttpDoor, Protocol):
    """A node's HTTP server (`FrontEnd`)."""

    def close(self) -> None:
        """End it."""


MakeReplica = Callable[[Identity, str], ReplicaHost]
"""make_replica(who this node is, the host by which others reach it)"""


class Worker:
    """One node: its listener for the data wire, its control thread, and the role that it has at the moment.

    `http` answers requests at this node, where it does.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        roles: Mapping[type[Settings], MakeRole] = ROLES,
        http: HttpServer | None = None,
        make_replica: MakeReplica | None = None,
    ) -> None:
        device = choose_device(settings.device, settings.place)  # what is not here shows before a token is spent
        compute_on(device)
        memory, room = room_of(device, settings.memory)
        uncounted = max(0, rss_bytes() - RUNTIME_BYTES) if device == CPU else 0
        self._settings, self._http = msgspec.structs.replace(settings, device=str(device)), http
        keep_freed_memory()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        address = asyncio.run(locate((settings.host, settings.port), settings.wait))
        if settings.listen:
            listen(settings.listen, 0).close()
        node = settings.node or node_name(socket.gethostname())
        self._identity = asyncio.run(join(address, JoinToken.parse(settings.token), node))
        self._placed: Assign | TakeRole | None = None  # among the ranks that it has links to
        self._roles = roles
        self._role: Role | None = None
        self._before: Role | None = None  # the role before a survey, which may hold what the next one takes over
        self._is_done = False  # with a role that has an end, as a survey has
        self._refused_frames = 0
        context, host = data_server(self._identity), settings.listen or own_address(address)
        cache = ChunkCache(
            Path(settings.weights_cache) if settings.weights_cache else None, settings.weights_cache_bytes
        )
        self._chunk_server = chunk_server = ChunkServer(host, self._identity, cache)
        self._listener = Listener(host, 0, context, self._authorize)
        versions = {"torch": str(torch.__version__)}
        try:
            facts = facts_of(
                node, self._listener.address, versions, chunk_server.port, memory, settings.is_shared, room
            )
            facts = msgspec.structs.replace(facts, can_succeed=make_replica is not None, uncounted_bytes=uncounted)
            replica = None if make_replica is None else make_replica(self._identity, host)
            fetcher = ChunkFetcher(address, self._identity, cache, chunk_server)
            beside = Beside(http, replica)
            self._control = Control(address, self._identity, facts, self, fetcher, settings.rejoin, beside)
        except TllmError:
            self._listener.close()
            chunk_server.close()
            raise

    @property
    def _device(self) -> torch.device:
        return torch.device(self._settings.device)

    def run(self) -> bool:
        """Follow orders until there are no more; whether the work has then come to its end. A failure while computing
        is reported and raised."""
        try:
            while (order := self._control.inbox.orders.get()) is not None:
                self._follow(order)
            if self._control.error is not None:
                raise self._control.error
            is_unfinished = self._control.inbox.is_unfinished
            log.info("ends: %s%s", self._control.reason, ", to go on another time" if is_unfinished else "")
            return not is_unfinished
        except KeyboardInterrupt:
            self._control.leave()
            raise
        except BaseException as error:
            if self._control.error is None:
                lack = out_of_memory(error, self._settings.memory)
                self._control.report(lack or error)
                if lack is not None:
                    raise lack from error
            elif isinstance(error, LinkError):  # which is only how the control thread woke us
                raise self._control.error from error
            raise
        finally:
            if self._role is not None:
                self._role.close()
            self._listener.close()
            if self._http is not None:
                self._http.close()
            self._control.close()

    def _follow(self, order: WorkerOrder) -> None:
        """Carry out one order. An error is the answer to it, as long as this node computes nothing yet."""
        message = order.message
        if not isinstance(message, TakeRole) and message.epoch < self._control.epoch:
            order.answer(ClusterError(f"epoch {message.epoch} is over"))
            return
        answering: AnsweringRole | None = None
        try:
            match message:
                case Assign():
                    order.answer(self._take_role(message).prepared())
                case Load():
                    order.answer(self._load(order))
                case TakeRole():
                    answering = self._begin_answering(message, order)
        except (TllmError, OSError) as error:
            said = error if isinstance(error, TllmError) else _of_this_machine(error)
            if not self._control.reason:
                log.error("%s: %s", type(message).__name__, said.message)
            order.answer(said)
        if isinstance(message, Start):
            self._compute(message, order)
        elif answering is not None:
            order.answer(answering.taken)
            answering.run(self._control)

    def ask_to_stop(self) -> None:
        """Ask the coordinator to let the training save and end, on every node."""
        self._control.post(Stop())

    def _begin_answering(self, message: TakeRole, order: WorkerOrder) -> AnsweringRole:
        self._end_role()
        self._placed, self._role, self._before, self._is_done = message, None, None, True
        given = self._listener, self._identity, self._device, self._control
        self._role = answering = AnsweringRole(message, *given, self._progress(order))
        return answering

    def _end_role(self) -> None:
        if self._role is not None:
            self._role.interrupt()
            self._role.close()

    def _take_role(self, assign: Assign) -> RankRole:
        self._end_role()
        self._placed, self._is_done = assign, False
        self._control.fetch.epoch = assign.epoch
        if assign.settings.threads:
            torch.set_num_threads(assign.settings.threads)
        if not self._settings.runs_own_code:
            check_no_code(assign)
        make = self._roles[type(assign.settings)]
        before = self._before if isinstance(self._role, SurveyRank) else self._role
        assign = with_own_folder(assign, (self._settings.cache_dir, self._settings.cache_dir_size))
        assign = with_own_device(assign, self._device)
        self._role = role = make(assign, self._identity, self._listener, self._control.fetch, before)
        self._before = before if isinstance(role, SurveyRank) else None
        return role

    def _load(self, order: WorkerOrder) -> Loaded:
        assert isinstance(self._role, RankRole), "an assignment comes before loading"
        return self._role.load(self._progress(order))

    def _progress(self, order: WorkerOrder) -> Callable[[int, int], None]:
        """Tells the coordinator how much is read for an order. ClusterError once another order has come, or the end."""
        last = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal last
            if not self._control.inbox.orders.empty():
                raise ClusterError("what was to be read is wanted no more")
            if done == total or time.monotonic() - last > PROGRESS_SECONDS:
                last = time.monotonic()
                order.answer(Progress(done, total))

        return progress

    def _compute(self, message: Start, order: WorkerOrder) -> None:
        """Run the role. If a link breaks, a node whose role can be made anew waits for the next assignment."""
        assert isinstance(self._role, RankRole), "loading comes before the start"
        assert isinstance(self._placed, Assign), "a role of a rank was assigned"
        has_plan = isinstance(self._placed.settings, EngineSettings | TrainSettings | AnswerSettings)
        if has_plan and not self._settings.is_shared:
            log.info("computes as %s of %s", describe_rank(self._placed.plan, self._role.rank), self._placed.plan)
        order.answer(Started(self._role.rank))
        try:
            self._role.run(self._control)
            self._is_done = True
        except LinkError as error:
            self._refused_frames += isinstance(error, FrameError)
            if self._control.inbox.is_unfinished:  # the control thread interrupted us, to end
                return
            if not self._role.outlives or self._control.error is not None:
                raise
            self._control.report_break(message.epoch, error)

    def _authorize(self, hello: LinkHello, certificate: Mapping[str, Any] | None) -> None:
        if self._placed is None or hello.source >= len(self._placed.places):
            raise AuthError(f"there is no rank {hello.source}")
        check_speaker(certificate, self._placed.places[hello.source].node, hello.source)

    @property
    def ends_with_starter(self) -> bool:
        return self._settings.ends_with_starter

    @property
    def outlives(self) -> bool:
        return self._role is None or self._role.outlives or self._is_done

    def last_place(self) -> tuple[int, int | None]:
        return self._control.epoch, self._placed.rank if isinstance(self._placed, Assign) else None

    def role_taken(self) -> RoleTaken | None:
        role = self._role
        return role.taken if isinstance(role, AnsweringRole) and not role.is_over else None

    def heartbeat(self) -> Heartbeat:
        role = self._role
        links, frames = (
            self._listener.refused + self._chunk_server.refused,
            self._refused_frames + self._chunk_server.refused_frames,
        )
        refused = {"refused_links": float(links), "refused_frames": float(frames)}
        held = held_memory(self._device)
        most = max(held, peak_memory(self._device))  # the system adds up the latter less often
        if role is None:
            return Heartbeat(rss_bytes=held, peak_bytes=most, stats=refused)
        stats = {**role.stats(), **refused}
        spans = role.spans() if isinstance(role, ServingRank) else ()
        return Heartbeat(rss_bytes=held, peak_bytes=most, links=role.link_bytes(), stats=stats, spans=spans)

    def command(self, command: Command) -> None:
        if self._role is not None:
            self._role.command(command)

    def load_adapter(self, message: LoadAdapter) -> AdapterReady:
        role = self._role
        if not isinstance(role, ServingRank):
            raise ClusterError("this node serves nothing now")
        try:
            return role.load_adapter(message.adapter)
        except (MemoryError, RuntimeError) as error:
            if (lack := out_of_memory(error, self._settings.memory)) is None:
                raise
            raise lack from error  # the node goes on without it

    def supersede(self, assign: Assign) -> None:
        self._listener.end_epochs_before(assign.cluster, assign.epoch)
        self.interrupt()

    def interrupt(self) -> None:
        if self._role is not None:
            self._role.interrupt()


def with_own_folder(assign: Assign, pages: tuple[str, int]) -> Assign:
    """An assignment whose pages on disk, if any, are kept in this node's own folder, of so many bytes."""
    folder, limit = pages
    settings = assign.settings
    if not folder or not isinstance(settings, EngineSettings) or settings.page_disk is None:
        return assign
    disk = msgspec.structs.replace(settings.page_disk, folder=folder, limit=limit)
    return msgspec.structs.replace(assign, settings=msgspec.structs.replace(settings, page_disk=disk))


def room_of(device: torch.device, given: int | None) -> tuple[int | None, DeviceFacts | None]:
    """Keep to the memory that was given, of the device or for a processor of the machine: what plans may count on of
    what was given, and the facts of the device."""
    if device != CPU:
        return given, DeviceFacts(device_name(device), usable_device_memory(device, given))
    private, touched = private_bytes()
    counted = usable_memory(given, touched)
    if given is None:
        return None, None
    if counted < given:
        log.info(
            "torch %s takes %d bytes more than plans count, of the %d given", torch.__version__, given - counted, given
        )
    keep_to(given + private - touched)  # libraries for GPUs have hundreds of MB that nobody ever writes to
    return counted, None


def with_own_device(assign: Assign, device: torch.device) -> Assign:
    """An assignment to compute on this node's device. An examination is of the machine, whatever computes there."""
    settings, own = assign.settings, str(device)
    match settings:
        case EngineSettings() | TrainSettings() | SurveySettings() | AnswerSettings():
            settings = msgspec.structs.replace(settings, device=own)
        case VerifySettings():
            settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, device=own))
        case DoctorSettings():
            return assign
    return msgspec.structs.replace(assign, settings=settings)


def _of_this_machine(error: OSError) -> ClusterError:
    """What the system refused this node, which may be well again later: a disk that is full, no descriptor left."""
    where = f" ({error.filename})" if error.filename else ""
    return ClusterError(f"{error.strerror or type(error).__name__}{where}", "see what this machine lacks")


def work(settings: WorkerSettings, http: HttpServer | None = None, make_replica: MakeReplica | None = None) -> bool:
    """Be a node until the cluster ends, which can take the coordinator's place with `make_replica`; whether the work
    has then come to its end. Raises the error that this node failed with."""
    return Worker(settings, http=http, make_replica=make_replica).run()


def main() -> int:
    """A worker that a coordinator here has started: one line of settings on stdin, and when stdin ends so do we.

    The line may come late, to a worker that is kept at hand for another's loss. Signals to end are the coordinator's
    to answer: a scheduler sends them to every process of a job, and the coordinator may have something to save first.
    """
    show_stacks_on_signal()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.stdout = PrintedLines(sys.stderr, sys.stdout.fileno())
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    settings = msgspec.json.decode(line, type=WorkerSettings)
    cores()  # which counts what this machine has, however few this process is then bound to
    bind(settings.processors)  # before there are threads, as each has its processors from the one that began it
    threading.Thread(target=_end_with_stdin, name="parent", daemon=True).start()
    try:
        work(settings)
    except TllmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _end_with_stdin() -> None:
    """The other end of stdin is the coordinator's alone, so it closes when that process is gone, however it went."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(ClusterError.exit_code)


if __name__ == "__main__":
    sys.exit(main())
