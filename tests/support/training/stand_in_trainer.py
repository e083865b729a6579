"""Nodes that join a training run, with the trainer or a small stand-in: it sums over groups, and fails when asked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import torch

from tllm.cluster.connection import parse_address
from tllm.cluster.settings import TrainSettings
from tllm.core.errors import CapacityError, ConfigError, TllmError
from tllm.node.roles import control
from tllm.node.roles.training_rank import TrainingRank
from tllm.node.worker import ROLES, Worker, WorkerSettings
from tllm.training.report.events import IsStopped, OnEvent, RunBegan, RunEnded, RunStepped, TrainerReady
from tllm.training.report.metrics import StepRecord
from tllm.training.snapshot.replication import SnapshotReplicator
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig
from tllm.weights.load import Progress

STEP_SECONDS = 0.02
IN_ORDER = 100
"""Added to the exit code of a node that ended by itself; one that had to be ended by force has none of this."""
END_SECONDS = 60.0
"""What a node here has to end in, else it is ended by force: a busy machine needs more than a user would wait."""
LATE = "late"
"""The file that a rank which ends later than the others leaves."""


class Fault(NamedTuple):
    """What goes wrong on which node, once how many steps are done; every node was given `memory`."""

    kind: str = ""
    node: str = ""
    step: int = 3
    memory: int | None = None


NONE = Fault()


class StandIn:
    """Takes the job's steps: in each, every rank's number is summed, and must be what the plan says."""

    def __init__(
        self,
        fault: Fault,
        node: str,
        config: RankConfig,
        initial_weights: InitialWeights,
        replicator: SnapshotReplicator | None,
    ) -> None:
        self.fault = fault if fault.node == node else NONE
        self.job, self.plan, self.rank, self.groups = config.job, config.plan, config.rank, config.groups
        assert (initial_weights.source is None) == (self.job.model_name_or_path is None)

    compute_seconds = 0.0

    def prepare(self, progress: Progress) -> TrainerReady:
        if self.fault.kind == "bad start":
            raise ConfigError("there is no data")
        if self.fault.kind == "no room" and self.plan.pp > 1:
            raise CapacityError("a stage needs 9 bytes and there are 8")
        progress(1, 1)
        self.groups.world.barrier()
        return TrainerReady(0, 100 + self.rank, 200)

    def run(self, on_event: OnEvent, is_stopped: IsStopped) -> None:
        on_event(RunBegan(0, 1, 1.0))
        step, stop = 0, False
        while step < self.job.max_steps and not stop:
            step += 1
            self._fail_at(step)
            total = torch.tensor([float(self.rank), float(is_stopped())])
            total = self.groups.world.all_reduce(total)
            assert total[0] == sum(range(self.plan.world_size))
            stop = bool(total[1])
            time.sleep(STEP_SECONDS)
            on_event(RunStepped(record(step, float(total[0]))))
        if self.fault.kind == "late":
            time.sleep(0.7)
            Path(self.job.output_dir, LATE).touch()
        on_event(RunEnded(step, "" if stop else "final"))

    def close(self) -> None:
        """There is nothing to close."""

    def _fail_at(self, step: int) -> None:
        if step == self.fault.step and self.fault.kind == "refuse":
            raise ConfigError(f"row {step} of the data is no row", "see the file")
        if step == self.fault.step and self.fault.kind == "hungry":
            list(map(torch.ones, [2**24] * 2**10))
        if step == self.fault.step and self.fault.kind == "fault":
            raise RuntimeError("something is broken")
        if step == self.fault.step and self.fault.kind in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[self.fault.kind])


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(
        step=step, loss=loss, grad_norm=1.0, learning_rate=1.0, tokens=1, seconds=1.0, tokens_per_second=1.0
    )


def start_node(address: str, token: str, node: str, fault: Fault | None = NONE, listen: str = "") -> ForkServerProcess:
    """A node as a process, which has the modules that it needs from its start; with the true trainer if no fault."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_be_node, args=(address, token, node, fault, listen))
    process.start()
    return process


def _be_node(address: str, token: str, node: str, fault: Fault | None, listen: str) -> None:
    control.END_SECONDS = END_SECONDS
    host, port = parse_address(address)
    parts = (
        ROLES if fault is None else {**ROLES, TrainSettings: partial(TrainingRank, make=partial(StandIn, fault, node))}
    )
    try:
        memory = fault.memory if fault is not None else None
        settings = WorkerSettings(host=host, port=port, token=token, node=node, threads=1, listen=listen, memory=memory)
        Worker(settings, parts).run()
    except TllmError as error:
        sys.exit(IN_ORDER + error.exit_code)
