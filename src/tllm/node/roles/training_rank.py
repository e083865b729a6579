"""`TrainingRank`: one node's part in a training run, from the assignment to the last save."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from tllm.cluster import messages
from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Loaded, Prepared
from tllm.cluster.settings import TrainSettings
from tllm.comm.collectives.group import Group, solo
from tllm.comm.links.connect import Listener
from tllm.comm.links.link import Link
from tllm.core.errors import LinkError
from tllm.core.memory import LARGEST_TRAINED, give_back_memory, keep_freed_memory, rss_bytes
from tllm.engine.driver import Command
from tllm.node.roles.control import Control
from tllm.node.roles.role import Role, bytes_by_wire, connect_wires, fetched, model_source
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Wire
from tllm.spec.process_groups import computing, wires
from tllm.train.job.job import Job
from tllm.train.job.job_parts import states_of
from tllm.train.job.run_start import begin
from tllm.train.report.events import RunEvent, RunStepped, encode
from tllm.train.report.step_report import forget_peak
from tllm.train.server_run import ParameterServerRun
from tllm.train.snapshot.memory_snapshot import MemorySnapshots
from tllm.train.snapshot.placement import MIRROR, RECALL, mirror_wires, recall_wires
from tllm.train.snapshot.replication import SnapshotReplicator
from tllm.train.spare_node import SpareNode
from tllm.train.state.initial_weights import STD
from tllm.train.step.rank_groups import Groups, group_of, groups_of, tuned
from tllm.train.trainer import IsStopped, Ready, Tell, Trainer
from tllm.weights.byte_source import ByteSource, Fetch
from tllm.weights.load import Progress


class Trains(Protocol):
    """What `train.trainer.Trainer` is to a node. `computing`: seconds of the last step, without what it waited for."""

    computing: float

    def prepare(self, progress: Progress) -> Ready: ...

    def run(self, tell: Tell, is_stopped: IsStopped) -> None: ...

    def close(self) -> None: ...


MakeTrainer = Callable[[Job, Assign, Groups, ByteSource | None, SnapshotReplicator | None], Trains]
"""make(job, assign, groups, source of the weights to begin from, copies of steps in memory)"""


def make_trainer(
    job: Job, assign: Assign, groups: Groups, source: ByteSource | None, mirror: SnapshotReplicator | None
) -> Trains:
    """The trainer of a rank, that of rank 0 reads the data; or a server."""
    config = json.loads(assign.config)
    spec = spec_from_config(config)
    if assign.rank not in computing(assign.plan):
        return ParameterServerRun(job, assign.plan, spec, assign.rank, groups)
    beginning = begin(job) if assign.rank == 0 else None
    std = config.get("initializer_range")
    std = STD if std is None else float(std)
    return Trainer(job, assign.plan, spec, assign.rank, groups, source, beginning, std, mirror)


class TrainingRank:
    """Connects the links; then `load` builds and fills the model, and `run` trains it until the run ends.

    An error while it runs is this rank's own, or a LinkError if another rank has failed. The in-memory snapshots of the
    run's last steps that the role `before` holds are taken over.
    """

    def __init__(
        self,
        assign: Assign,
        identity: Identity,
        listener: Listener,
        fetch: Fetch,
        before: Role | None = None,
        make: MakeTrainer = make_trainer,
    ) -> None:
        assert isinstance(assign.settings, TrainSettings), "serving is another part"
        self.rank, self.outlives = assign.rank, assign.settings.outlives
        self._assign, self._fetch, self._make = assign, fetch, make
        self._copies = before.copies(assign) if isinstance(before, TrainingRank) else MemorySnapshots()
        self._hosts = [place.host for place in assign.places[: assign.plan.world_size]]
        mirroring = mirror_wires(self._hosts) if assign.settings.mirrored else []
        every = [*wires(assign.plan), *mirroring, *recall_wires(len(self._hosts), len(assign.places))]
        seconds = assign.settings.link_seconds  # also to connect: another rank may be within a long step still
        self._links = connect_wires(assign, every, identity, listener, seconds, assign.settings.wiring, seconds)
        self._trainer: Trains | None = None
        self._step = 0

    def copies(self, assign: Assign) -> MemorySnapshots:
        """The in-memory snapshots of the run's last steps, if another assignment is of the same run; else none."""
        return self._copies if _run_of(assign) == _run_of(self._assign) else MemorySnapshots()

    def prepared(self) -> Prepared:
        """Nothing yet: the model is built when it is filled."""
        return Prepared(rank=self.rank)

    def load(self, progress: Progress) -> Loaded:
        """Build the model, and fill it from the run's last save, the weights to begin from, or at random."""
        start = time.monotonic()
        keep_freed_memory(LARGEST_TRAINED)
        give_back_memory()
        forget_peak()  # of the part before, in another epoch or a survey
        if self.rank >= len(self._hosts):
            return self._give_snapshots(progress, start)
        assert isinstance(self._assign.settings, TrainSettings)
        job = msgspec.json.decode(self._assign.settings.job, type=Job)
        source = model_source(self._assign, self._fetch) if self._assign.files else None
        plan = self._assign.plan
        groups = tuned(groups_of(plan, self.rank, self._links), plan, self.rank, self._hosts)
        mirror = self._mirror(groups.save) if self._assign.settings.mirrored else None
        self._trainer = self._make(job, self._assign, groups, source, mirror)
        ready = self._trainer.prepare(progress)
        self._step = ready.step
        read = source.bytes_read if source else 0
        return Loaded(
            rank=self.rank,
            bytes_read=read,
            fetched=fetched(source) if source else 0,
            seconds=time.monotonic() - start,
            rss_bytes=rss_bytes(),
            step=ready.step,
            network=groups.network,
            parameter_bytes=ready.parameter_bytes,
            state_bytes=ready.state_bytes,
        )

    def run(self, control: Control) -> None:
        """Train until all steps are done or the run is stopped, then send `Done`. Rank 0 sends the run's events."""
        assert self._trainer is not None, "load comes before run"

        def tell(news: RunEvent) -> None:
            if isinstance(news, RunStepped):
                self._step = news.record.step
            if self.rank == 0:
                control.post(messages.News(encode(news)))

        self._trainer.run(tell, control.inbox.stopped.is_set)
        control.post(messages.Done())

    def stats(self) -> dict[str, float]:
        return {"step": self._step, "computing": self._trainer.computing if self._trainer is not None else 0.0}

    def link_bytes(self) -> dict[str, int]:
        return bytes_by_wire(self._links)

    def command(self, command: Command) -> None:
        """Nothing: no requests are served here."""

    def interrupt(self) -> None:
        for link in self._links.values():
            link.interrupt()

    def close(self) -> None:
        """End everything. What is still under way, as in a run that failed, is lost."""
        self.interrupt()  # first, to wake threads that wait on links; the LinkErrors that follow are of our making
        with contextlib.suppress(LinkError):
            if self._trainer is not None:
                self._trainer.close()
        for link in self._links.values():
            with contextlib.suppress(LinkError):
                link.close()
        self._trainer = None
        gc.collect()  # modules and their hooks form cycles, and the next role needs their memory

    def _give_snapshots(self, progress: Progress, start: float) -> Loaded:
        """Of a node without a rank of the plan: give its in-memory snapshots to those that have one."""
        self._trainer = SpareNode(self._mirror(solo()))
        ready = self._trainer.prepare(progress)
        seconds = time.monotonic() - start
        return Loaded(rank=self.rank, bytes_read=0, fetched=0, seconds=seconds, rss_bytes=rss_bytes(), step=ready.step)

    def _mirror(self, group: Group) -> SnapshotReplicator:
        """What replicates snapshots, over the `group` of all ranks, or over one of all nodes if others have some."""
        nodes = range(len(self._assign.places))
        if len(nodes) > len(self._hosts):
            group = group_of(RECALL, nodes, self.rank, self._links)
        return SnapshotReplicator(
            self._copies, self._assign.epoch, group, self._hosts, *mirror_links(self.rank, self._links)
        )


def _run_of(assign: Assign) -> tuple[object, ...]:
    """What identifies a run. All else of its job and plan may change when it goes on, as it may from a checkpoint."""
    assert isinstance(assign.settings, TrainSettings)
    job = msgspec.json.decode(assign.settings.job, type=Job)
    return assign.cluster, assign.config, assign.settings.run, states_of(job)


def mirror_links(rank: int, links: Mapping[Wire, Link]) -> tuple[Link | None, dict[int, Link]]:
    """The link to this rank's mirror, and those from the ranks that it mirrors, by rank."""
    named = {wire: link for wire, link in links.items() if wire.name == MIRROR}
    to = next((link for wire, link in named.items() if wire.source == rank), None)
    return to, {wire.source: link for wire, link in sorted(named.items()) if wire.target == rank}
