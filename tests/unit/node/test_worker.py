"""What a worker's parts are given of the part before."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tllm.cluster.messages import AdapterReady, Assign, Load, LoadAdapter, Loaded, Progress, Start, TakeRole
from tllm.cluster.settings import DoctorSettings, EngineSettings, SurveySettings, TrainSettings, VerifySettings
from tllm.cluster.weight_messages import AdapterFiles
from tllm.core.errors import CapacityError, ClusterError, ConfigError, LinkError
from tllm.node import worker as worker_module
from tllm.node.coordinator.forming import _ending
from tllm.node.roles.control import Inbox, WorkerOrder
from tllm.node.roles.serving_rank import ServingRank
from tllm.node.roles.survey_rank import SurveyRank
from tllm.node.roles.training_rank import TrainingRank, check_no_code
from tllm.node.worker import Worker, WorkerSettings, with_own_device
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import GRPOConfig
from tllm.training.snapshot.memory_snapshot import MemorySnapshots

JOB = Job(output_dir="run", train_files=("rows.jsonl",), max_steps=9, config_name="config.json")


def settings_of(run: str = "a run", mirrored: bool = True, **more: Any) -> TrainSettings:
    job = msgspec.json.encode(replace(JOB, **more)).decode()
    return TrainSettings(job=job, threads=0, link_seconds=1.0, outlives=True, mirrored=mirrored, run=run)


def engine_settings(**more: Any) -> EngineSettings:
    sizes = dict(num_pages=1, page_size=16, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16)
    return EngineSettings(**{**sizes, "dtype": "float32", "threads": 0, "link_seconds": 1.0, **more})


TRAIN = settings_of()
SURVEY = SurveySettings(dtype="float32", length=8, rows=(8,), measure_seconds=0.1, way_seconds=0.1, link_seconds=1.0)


def assign(settings: Any) -> Assign:
    plan = Plan.parse("pp=1", 1)
    facts = dict(cluster="c", epoch=1, rank=0, plan=plan, places=(), config="{}", folder="", files=())
    return Assign(settings=settings, **facts)  # type: ignore[arg-type]


class Training(TrainingRank):
    """Made without wires, as it is never run."""

    def __init__(self, assign: Assign, *rest: Any) -> None:
        before, self._assign = rest[-1], assign
        self._snapshots = before.snapshots(assign) if isinstance(before, TrainingRank) else MemorySnapshots()

    def interrupt(self) -> None:
        """There is nothing to wake."""

    close = interrupt


class Surveying(SurveyRank):
    def __init__(self, *_: Any) -> None:
        """Measures nothing."""

    def interrupt(self) -> None:
        """There is nothing to wake."""

    close = interrupt


def worker() -> Worker:
    """One that has not joined."""
    made = Worker.__new__(Worker)
    made._roles = {TrainSettings: Training, SurveySettings: Surveying}
    made._role = made._before = None
    made._identity = made._listener = None  # type: ignore[assignment]
    made._settings = WorkerSettings(host="", port=0, token="")
    made._control = SimpleNamespace(fetch=SimpleNamespace(epoch=0), reason="")  # type: ignore[assignment]
    return made


def copies(one: Worker, settings: Any) -> MemorySnapshots:
    part = one._take_role(assign(settings))
    assert isinstance(part, TrainingRank)
    return part._snapshots


def test_what_a_node_has_of_a_run_outlives_surveys_and_changes_of_the_job_and_no_other_run() -> None:
    one = worker()
    first = copies(one, TRAIN)
    for _ in range(2):
        one._take_role(assign(SURVEY))
    assert copies(one, TRAIN) is first, "a new coordinator may measure nodes before it gives them their part"
    other = settings_of(mirrored=False, plan="tp=2", max_steps=20, learning_rate=1.0, microbatch_size=4)
    assert copies(one, other) is first, "as a save does"
    for more in ({"run": "another"}, {"delay_steps": 1}, {"gradient_compression": "int8"}, {"dtype": "float64"}):
        now = copies(one, TRAIN)
        assert copies(one, settings_of(**more)) is not now, more
    assert one._before is None, "what a part no longer needs is not kept for it"


def test_a_part_that_the_system_refuses_is_answered_and_the_node_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(one: Worker, assign: Assign) -> TrainingRank:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/pages")

    one, answers = worker(), list[Any]()
    one._control.epoch = 1
    monkeypatch.setattr(Worker, "_take_role", refuse)
    one._follow(WorkerOrder(assign(TRAIN), answers.append))
    (said,) = answers
    assert isinstance(said, ClusterError) and said.message == "No space left on device (/cache/pages)"


def test_a_node_that_reads_a_model_for_a_role_says_how_far_it_is_until_it_has_another_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had 600 s for all of it, too few for 14 GB over 100 Mbit/s, and read on where it was to do something else."""
    one, answers = worker(), list[Any]()
    one._control.inbox = Inbox()

    def read(*given: Any) -> None:
        progress = given[-1]
        progress(1, 2)
        one._control.inbox.orders.put(WorkerOrder(assign(TRAIN), answers.append))
        progress(2, 2)
        raise AssertionError("it reads on for a role that it has no more")

    monkeypatch.setattr(worker_module, "AnsweringRole", read)
    one._follow(WorkerOrder(TakeRole(role="teacher", model="m", config="{}"), answers.append))
    told, fault = answers
    assert told == Progress(1, 2) and isinstance(fault, ClusterError)


def test_each_node_puts_its_own_device_in_the_place_of_what_it_is_told() -> None:
    engine = engine_settings()
    verify = VerifySettings(engine=engine, token_ids=(1,), truth="", threads=0, link_seconds=1.0)
    doctor = DoctorSettings(measure_seconds=0.1, way_seconds=0.1, threads=0, link_seconds=1.0)
    told = [with_own_device(assign(one), torch.device("cuda", 1)).settings for one in (engine, TRAIN, SURVEY, verify)]
    own = [one.engine if isinstance(one, VerifySettings) else one for one in told]
    assert [getattr(one, "device", "") for one in own] == ["cuda:1"] * 4
    assert with_own_device(assign(doctor), torch.device("cuda", 1)).settings == doctor, "of the machine"


def test_what_the_device_cannot_serve_is_refused_before_a_wire_is_connected(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    told = msgspec.structs.replace(
        assign(engine_settings(device="mps:0")), config=(tmp_path / "config.json").read_text()
    )
    with pytest.raises(ConfigError, match="mps:0 has no float64, in which tokens are drawn"):
        ServingRank(told, None, None, None)  # type: ignore[arg-type]


def test_a_node_that_the_users_own_command_has_not_started_runs_no_code_of_a_job() -> None:
    for name, table in (
        ("rewards", GRPOConfig(reward_funcs=("rewards.py:correct",))),
        ("games", GRPOConfig(environment_factory="games.py:Game")),
    ):
        rewarded = assign(settings_of(task="grpo", grpo=table))
        said = rf"rank 0 runs the reward functions, tools and tasks {name}\.py:.* this node runs nobody's code"
        with pytest.raises(ConfigError, match=said):
            check_no_code(rewarded)
    check_no_code(msgspec.structs.replace(rewarded, rank=1))
    check_no_code(assign(TRAIN))


class Interrupted:
    """A role that loads, or computes, until the node is interrupted because its cluster was ended."""

    rank, outlives = 0, False

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def load(self, progress: Callable[[int, int], None]) -> Loaded:
        self.end()
        progress(1, 2)
        raise AssertionError("it loads on for a cluster that is over")

    def run(self, control: Any) -> None:
        self.end()
        raise LinkError("a link was interrupted")

    def close(self) -> None: ...


@pytest.mark.parametrize("message", [Load(1), Start(1)])
@pytest.mark.parametrize("is_unfinished", [True, False])
def test_a_coordinator_that_its_operator_ended_is_no_failure_of_the_node(
    message: Load | Start, is_unfinished: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`tllm join` ended with an error and code 4 where somebody pressed Ctrl-C at the first machine."""
    monkeypatch.setattr(worker_module, "RankRole", Interrupted)
    ended = ClusterError("why it ends")
    control: Any = SimpleNamespace(inbox=Inbox(), epoch=1, reason="", error=None, close=lambda: None)

    def end() -> None:
        control.reason, control.inbox.is_unfinished = ended.message, is_unfinished
        control.error = None if is_unfinished else ended
        control.inbox.end()

    node: Any = Worker.__new__(Worker)
    node._control, node._role, node._http, node._refused_frames = control, Interrupted(end), None, 0
    node._listener = SimpleNamespace(close=lambda: None)
    node._settings, node._placed = WorkerSettings(host="box", port=1, token=""), assign(TRAIN)
    answers: list[object] = []
    control.inbox.orders.put(WorkerOrder(message, answers.append))
    with caplog.at_level(logging.INFO, "tllm.node"):
        if is_unfinished:
            assert node.run() is False
            assert caplog.messages[-1] == "ends: why it ends, to go on another time"
        else:
            with pytest.raises(ClusterError, match="why it ends"):
                node.run()
    assert all(record.levelno == logging.INFO for record in caplog.records), "an end in order is no error"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (asyncio.CancelledError(), ("the first machine's command was ended by its operator", True)),
        (KeyboardInterrupt(), ("the first machine's command was ended by its operator", True)),
        (RuntimeError("a fault"), ("the coordinator failed", False)),
        (ClusterError("a node is lost"), ("a node is lost", False)),
    ],
)
def test_nodes_are_told_who_ended_their_coordinator(raised: BaseException, told: tuple[str, bool]) -> None:
    members = SimpleNamespace(is_unfinished=False)
    members.end = lambda reason="": setattr(members, "told", (reason, members.is_unfinished))
    coordinator: Any = SimpleNamespace(members=members)
    with pytest.raises(type(raised)), _ending(coordinator):
        raise raised
    assert members.told == told


def test_an_adapter_that_does_not_fit_into_memory_is_refused_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control thread failed of it, and with it the node; the next one by its name failed of the same adapter."""

    def load(part: ServingRank, adapter: AdapterFiles) -> AdapterReady:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    one = worker()
    one._role = ServingRank.__new__(ServingRank)
    monkeypatch.setattr(ServingRank, "load_adapter", load)
    with pytest.raises(CapacityError, match="out of memory"):
        one.load_adapter(LoadAdapter(1, AdapterFiles("x", 1, {})))
