"""`TrainingRank`: one node's part in a training run, from the assignment to the last save."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, get_args

import torch

from tllm.cluster import messages
from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Loaded, Prepared
from tllm.cluster.settings import TrainSettings
from tllm.cluster.tls import data_client
from tllm.comm.collectives.group import Group, group_of, solo
from tllm.comm.links.connect import Listener
from tllm.core.errors import ConfigError, LinkClosed, LinkError
from tllm.core.memory import LARGEST_TRAINED, free_bytes, give_back_memory, keep_freed_memory, rss_bytes
from tllm.devices.memory import forget_peak, held_memory
from tllm.engine.driver import Command
from tllm.node.roles.colocated_rollouts import colocated_rollouts
from tllm.node.roles.control import Control
from tllm.node.roles.role import Role, bytes_by_wire, connect_wires, fetched, model_source
from tllm.spec.families import spec_from_config
from tllm.spec.process_groups import RoleName, computing, wires
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import decode_job
from tllm.training.job.job_parts import role_nodes, states_of
from tllm.training.parameter_server.server_run import ParameterServerRun
from tllm.training.questions.answerer_pool import ClusterAnswerers
from tllm.training.report.events import IsStopped, OnEvent, RunEvent, RunStepped, TrainerReady, encode
from tllm.training.snapshot.memory_snapshot import MemorySnapshots
from tllm.training.snapshot.placement import RESTORE, restore_wires, snapshot_wires
from tllm.training.snapshot.replication import SnapshotReplicator, snapshot_links
from tllm.training.snapshot.spare_node import SpareNode
from tllm.training.state.initial_weights import STD, InitialWeights
from tllm.training.step.rank_groups import RankConfig, groups_of, on_devices, tuned
from tllm.training.trainer import RankTrainer
from tllm.weights.byte_source import Fetch
from tllm.weights.load import Progress


class RankRun(Protocol):
    """A rank's part in a run: a `RankTrainer`, a parameter server, or a spare node.

    `compute_seconds`: of the last step, without the time in which it waited for others.
    """

    @property
    def compute_seconds(self) -> float: ...

    def prepare(self, progress: Progress) -> TrainerReady: ...

    def run(self, on_event: OnEvent, is_stopped: IsStopped) -> None: ...

    def close(self) -> None: ...


MakeTrainer = Callable[[RankConfig, InitialWeights, SnapshotReplicator | None], RankRun]
"""make(what this rank is asked to do, the weights to begin from, snapshots of steps in memory)"""


def make_trainer(config: RankConfig, initial_weights: InitialWeights, replicator: SnapshotReplicator | None) -> RankRun:
    """The trainer of a rank, of which that of rank 0 reads the data; or a parameter server."""
    if config.rank not in computing(config.plan):
        return ParameterServerRun(config)
    initial_model = open_initial_model(config.job) if config.rank == 0 else None
    return RankTrainer(config, initial_weights, initial_model, replicator, colocated_rollouts)


def check_no_code(assign: Assign) -> None:
    """ConfigError for a rank that would load functions of a job which somebody else's command has sent."""
    if not isinstance(assign.settings, TrainSettings) or assign.rank != 0:
        return
    job = decode_job(assign.settings.job)
    code = (*(() if job.rollouts is None else job.rollouts.own_code), *job.lm_eval_tasks)
    if code:
        raise ConfigError(
            f"rank 0 runs the reward functions, tools and tasks {', '.join(code)}, and this node runs nobody's code",
            "let rank 0 be on the machine where `tllm train` was started",
        )


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
        self._snapshots = before.snapshots(assign) if isinstance(before, TrainingRank) else MemorySnapshots()
        if isinstance(before, TrainingRank) and self.rank < assign.plan.world_size:
            before.make_room(assign)
        mirroring = snapshot_wires(self._hosts) if assign.settings.mirrored else []
        every = [*wires(assign.plan), *mirroring, *restore_wires(len(self._hosts), len(assign.places))]
        seconds = assign.settings.link_seconds  # also to connect: another rank may be within a long step still
        self._links = connect_wires(assign, every, identity, listener, seconds, assign.settings.wiring, seconds)
        self._trainer: RankRun | None = None
        self._step = self._held = 0
        asks = self.rank == 0 and bool(role_nodes(decode_job(assign.settings.job)))
        self._answerers = ClusterAnswerers(data_client(identity)) if asks else None
        self._is_over = threading.Event()

    @property
    def _hosts(self) -> list[str]:
        """Of the plan's ranks."""
        return [place.host for place in self._assign.places[: self._assign.plan.world_size]]

    def snapshots(self, assign: Assign) -> MemorySnapshots:
        """The in-memory snapshots of the run's last steps, if another assignment is of the same run; else none."""
        return self._snapshots if _run_of(assign) == _run_of(self._assign) else MemorySnapshots()

    def make_room(self, assign: Assign) -> None:
        """Let the weights go that were kept of this part, where the next one would not fit beside them: of fewer ranks
        each has a larger part."""
        hosts = [place.host for place in assign.places]
        grows = max(1.0, self._assign.plan.world_size / assign.plan.world_size)
        self._snapshots.free_live(free_bytes() // hosts.count(hosts[assign.rank]), int(self._held * grows))

    def prepared(self) -> Prepared:
        """Nothing yet: the model is built when it is filled."""
        return Prepared(rank=self.rank)

    def load(self, progress: Progress) -> Loaded:
        """Build the model, and fill it from the run's last save, the weights to begin from, or at random."""
        start = time.monotonic()
        keep_freed_memory(LARGEST_TRAINED)
        give_back_memory()
        if self.rank >= len(self._hosts):
            return self._give_snapshots(progress, start)
        settings = self._assign.settings
        assert isinstance(settings, TrainSettings)
        device = torch.device(settings.device)
        forget_peak(device)  # of the part before, in another epoch or a survey
        source = model_source(self._assign, self._fetch) if self._assign.files else None
        plan = self._assign.plan
        groups = groups_of(plan, self.rank, self._links)
        with contextlib.ExitStack() as unmade:
            unmade.callback(groups.close_devices)  # which the trainer does, once it is there
            if settings.wiring.intra_host == "nccl":
                groups = on_devices(groups, plan, self.rank, self._hosts[self.rank], device, settings.link_seconds)
            groups = tuned(groups, plan, self.rank, self._hosts)
            replicator = self._replicator(groups.save) if settings.mirrored else None
            model_config = json.loads(self._assign.config)
            job = decode_job(settings.job)
            spec = spec_from_config(model_config)
            predicted = settings.predicted
            of_this_plan = predicted.by_role if predicted is not None and predicted.plan == str(plan) else {}
            config = RankConfig(job, plan, spec, self.rank, groups, device, self._answerers, of_this_plan)
            std = model_config.get("initializer_range")
            initial_weights = InitialWeights(source, STD if std is None else float(std), model_config)
            self._trainer = self._make(config, initial_weights, replicator)
            unmade.pop_all()
        ready = self._trainer.prepare(progress)
        self._step, self._held = ready.step, ready.parameter_bytes + ready.state_bytes
        read = source.bytes_read if source else 0
        return Loaded(
            rank=self.rank,
            bytes_read=read,
            fetched=fetched(source) if source else 0,
            seconds=time.monotonic() - start,
            rss_bytes=held_memory(device),
            step=ready.step,
            network=groups.network,
            parameter_bytes=ready.parameter_bytes,
            state_bytes=ready.state_bytes,
        )

    def run(self, control: Control) -> None:
        """Train until all steps are done or the run is stopped, then send `Done`. Rank 0 sends the run's events."""
        assert self._trainer is not None, "load comes before run"

        def on_event(event: RunEvent) -> None:
            if isinstance(event, RunStepped):
                self._step = event.record.step
            if self.rank == 0:
                control.post(messages.News(encode(event)))
            if isinstance(event, RunStepped) and self._is_over.is_set():  # a rank alone has no link to hear it by
                raise LinkClosed("the epoch that this rank trains in is over")

        if self._answerers is not None:
            for role in get_args(RoleName):
                control.inbox.answerers.follow(role, partial(self._answerers.places.tell, role))
        try:
            self._trainer.run(on_event, control.inbox.stopped.is_set)
        finally:
            control.inbox.answerers.forget()  # who followed keeps the run's weights
        control.post(messages.Done())

    def stats(self) -> dict[str, float]:
        trainer = self._trainer  # once: the main thread lets go of it
        return {"step": self._step, "computing": 0.0 if trainer is None else trainer.compute_seconds}

    def link_bytes(self) -> dict[str, int]:
        return bytes_by_wire(self._links)

    def command(self, command: Command) -> None:
        """Nothing: no requests are served here."""

    def interrupt(self) -> None:
        self._is_over.set()
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
        give_back_memory()
        self.make_room(self._assign)  # whatever comes next may be as large

    def _give_snapshots(self, progress: Progress, start: float) -> Loaded:
        """Of a node without a rank of the plan: give its in-memory snapshots to those that have one."""
        self._trainer = SpareNode(self._replicator(solo()))
        ready = self._trainer.prepare(progress)
        seconds = time.monotonic() - start
        return Loaded(rank=self.rank, bytes_read=0, fetched=0, seconds=seconds, rss_bytes=rss_bytes(), step=ready.step)

    def _replicator(self, group: Group) -> SnapshotReplicator:
        """What replicates snapshots, over the `group` of all ranks, or over one of all nodes if others have some."""
        nodes = range(len(self._assign.places))
        if len(nodes) > len(self._hosts):
            group = group_of(RESTORE, nodes, self.rank, self._links)
        return SnapshotReplicator(
            self._snapshots, self._assign.epoch, group, self._hosts, snapshot_links(self.rank, self._links)
        )


def _run_of(assign: Assign) -> tuple[object, ...]:
    """What identifies a run. All else of its job and plan may change when it goes on, as it may from a checkpoint."""
    assert isinstance(assign.settings, TrainSettings)
    return assign.cluster, assign.config, assign.settings.run, states_of(decode_job(assign.settings.job))
