"""What a machine looks at before it takes a training run over, and what it then knows of the run, without any node."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.training.small_job import write_job
from tests.support.training.stand_in_trainer import record
from tests.unit.cluster.kits import facts
from tllm.cluster.certificates import Authority
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.consensus.replicated_state import AnyEntry, StepsTrained, TrainedSteps
from tllm.cluster.state import NodeJoined, Planned, RankReady
from tllm.core.errors import ClusterError, ConfigError
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions
from tllm.node.replication.replica_host import check_readable
from tllm.node.replication.replicated_work import replicated_work, workload_of
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.open_training import open_training
from tllm.node.train.replicated_steps import keeping_steps
from tllm.node.train.takeover import open_run_here
from tllm.node.train.training_run import is_mirrored
from tllm.node.train.training_work import TrainingWork
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import FOLDER, NAME, digest_of, files_read, open_initial_model, run_name
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob, read_job
from tllm.training.job.rollout_keys import GRPOConfig
from tllm.training.report.events import RunBegan, RunEvent, RunResumed, RunSaved, RunStepped
from tllm.training.report.metrics import MetricsFile

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that has begun on the first machine."""
    begun = read_job(write_job(tmp_path_factory.mktemp("first"))).job
    open_initial_model(begun)
    return begun


def after(job: Job, step: int) -> TrainedSteps:
    """What replicas know of it after a step."""
    return TrainedSteps(step=step, written="first:/run", beginning=digest_of(Path(job.output_dir) / FOLDER))


def test_a_machine_that_shares_the_folder_goes_on_in_it(job: Job) -> None:
    metrics = MetricsFile(Path(job.output_dir))
    for step in (1, 2, 3):
        metrics.write(record(step, 1.0))
    metrics.close()
    said = open_run_here(job, run_name(job), after(job, 2))
    assert said == f"metrics and saves go on in {Path(job.output_dir).resolve()}, which {HOST} shares or had before"


def test_one_that_does_not_writes_its_own_and_says_where_the_rest_is(job: Job, tmp_path: Path) -> None:
    here = replace(job, output_dir=str(tmp_path / "own"))
    said = open_run_here(here, run_name(job), after(job, 20))
    assert said == (
        f"metrics and saves go to {tmp_path / 'own'} on {HOST} from now on; metrics of steps up to 20 are in first:/run"
    )
    assert run_name(here) == run_name(job) != ""
    assert digest_of(tmp_path / "own" / FOLDER) == digest_of(Path(job.output_dir) / FOLDER)


def test_the_folder_of_another_run_is_left_alone(job: Job, tmp_path: Path) -> None:
    here = replace(job, output_dir=str(tmp_path / "own"))
    open_initial_model(here)
    before = run_name(here)
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'own'} on {HOST} is the folder of another run"):
        open_run_here(here, run_name(job), after(job, 20))
    assert run_name(here) == before


def test_another_tokenizer_is_not_gone_on_with(job: Job, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "quite another text, of which other pairs of bytes are joined"}\n')
    here = replace(job, output_dir=str(tmp_path / "own"), train_files=(str(rows),))
    with pytest.raises(ConfigError, match=rf"own/start on {HOST} is not what the run in first:/run began with"):
        open_run_here(here, run_name(job), after(job, 20))


def test_before_the_first_step_there_is_nothing_to_compare(job: Job, tmp_path: Path) -> None:
    here = replace(job, output_dir=str(tmp_path / "own"))
    assert open_run_here(here, run_name(job), None) == f"metrics and saves go to {tmp_path / 'own'} on {HOST}"


def test_a_file_that_is_not_there_is_named_with_the_machine(job: Job, tmp_path: Path) -> None:
    check_readable(files_read(job))
    assert files_read(job) == (*job.train_files, job.config_name)
    scored = GRPOConfig(reward_model_name_or_path=str(tmp_path), reward_nodes=(1,))
    assert str(tmp_path) in files_read(replace(job, task="grpo", grpo=scored)), "texts are read by its tokenizer here"
    missing = str(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=rf"{missing} cannot be read on {HOST}, in {Path.cwd()}"):
        check_readable((*job.train_files, missing))


def test_what_begins_a_run_is_told_apart_by_content_and_not_by_name(job: Job, tmp_path: Path) -> None:
    here = replace(job, output_dir=str(tmp_path / "own"))
    open_initial_model(here)
    folder = tmp_path / "own" / FOLDER
    assert digest_of(folder) == digest_of(Path(job.output_dir) / FOLDER)
    assert (folder / NAME).read_text() != run_name(job)
    (folder / "chat_template.jinja").write_text("")
    assert digest_of(folder) == digest_of(Path(job.output_dir) / FOLDER), "an empty one says what none says"
    (folder / "chat_template.jinja").write_text("x")
    assert digest_of(folder) != digest_of(Path(job.output_dir) / FOLDER)


Make = Callable[..., ElasticRun]


@pytest.fixture
def make(job: Job) -> Iterator[Make]:
    """The run as a machine coordinates it that has taken it over."""
    made: list[ElasticRun] = []

    def run(trained: TrainedSteps | None, mirrored: bool = True) -> ElasticRun:
        config = Path(job.config_name or "").read_text()
        plan = Plan.parse("pp=2", spec_from_config(msgspec.json.decode(config)).num_layers)
        first = TrainingWork(ResolvedJob(job, {}), plan, config).workload(ClusterOptions(link_seconds=60.0))
        settings = msgspec.structs.replace(first.settings, mirrored=mirrored, outlives=True)
        kept = replicated_work(replace(first, settings=settings), "replan", 3)
        work = workload_of(msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=type(kept)), "", 0)
        assert work.reads == files_read(job)
        one = ElasticRun(work, Authority.create(), LOOPBACK, ("b",))
        made.append(one)
        one.take_up(trained, is_mirrored(work))
        for node in "ab":
            one.coordinator.members.record(NodeJoined(node, facts(node), 0.0))
        one.coordinator.members.record(Planned(plan, ("b", "a")))
        for node in "ab":
            one.coordinator.members.record(RankReady(node))
        return one

    yield run
    for one in made:
        one.coordinator.control_server.close()


async def told(run: ElasticRun, count: int) -> list[RunEvent]:
    news = run.events()
    return [await anext(news) for _ in range(count)]


def test_it_says_how_many_steps_are_done_again(make: Make) -> None:
    async def scene() -> None:
        run = make(TrainedSteps(step=12, saved=8))
        run.publish(RunBegan(11, 1, 1.0, origin="memory"))
        _, again = await told(run, 2)
        assert isinstance(again, RunResumed) and again.seconds > 0
        assert (again.step, again.again, again.origin, again.nodes) == (11, 1, "memory", ("b", "a"))

    asyncio.run(scene())


def test_its_own_worker_has_rank_0_whatever_it_had_before(make: Make) -> None:
    run = make(TrainedSteps(step=12))
    assert run.recovery.move.placement.fill(["a", "b", "c"], {"a": 0, "b": 2, "c": 1}) == {0: "b", 1: "c"}


def test_snapshots_that_found_no_room_before_are_not_looked_for(make: Make) -> None:
    assert is_mirrored(make(TrainedSteps(step=12)).coordinator.work)
    assert not is_mirrored(make(TrainedSteps(step=12), mirrored=False).coordinator.work)


def test_room_for_snapshots_is_not_asked_again_of_fewer_machines(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """They would be thrown away, with the steps that they hold."""
    small = msgspec.structs.replace(facts("b"), memory_bytes=1)
    for trained, keeps in ((TrainedSteps(step=12), True), (None, False)):
        run = make(trained)
        run.coordinator.members.record(NodeJoined("b", small, 0.0))
        with caplog.at_level(logging.WARNING):
            run.before_epoch(run.coordinator.work.plan, ("b", "a"))
        assert is_mirrored(run.coordinator.work) == keeps


def test_a_run_that_has_saved_does_not_begin_anew_where_the_saves_are_not(make: Make) -> None:
    async def scene() -> None:
        run = make(TrainedSteps(step=12, saved=8))
        run.publish(RunBegan(0, 1, 1.0))
        with pytest.raises(ClusterError, match="no file of the save of step 8 is on the machines that are left"):
            await told(run, 3)
        early = make(TrainedSteps(step=3))
        early.publish(RunBegan(0, 1, 1.0))
        _, again = await told(early, 2)
        assert isinstance(again, RunResumed) and (again.origin, again.again) == ("start", 3)

    asyncio.run(scene())


def test_replicas_of_a_run_that_ends_with_any_machine_are_refused(job: Job) -> None:
    async def scene() -> None:
        config = Path(job.config_name or "").read_text()
        work = TrainingWork(ResolvedJob(job, {}), Plan.parse("pp=2", 2), config)
        with pytest.raises(ConfigError, match="3 replicas of the coordinator's state, and on_loss is end"):
            async with open_training(work, ClusterOptions(replicas=3), on_loss="end"):
                raise AssertionError("it has opened")

    asyncio.run(scene())


class Agreed:
    """Replicas that agree on everything until they are told not to."""

    def __init__(self) -> None:
        self.entries: list[AnyEntry] = []
        self.is_deposed = False

    async def propose(self, entry: AnyEntry) -> None:
        if self.is_deposed:
            raise Deposed("another leads")
        self.entries.append(entry)


def test_replicas_know_the_last_step_and_the_last_save(make: Make, job: Job) -> None:
    async def scene() -> None:
        run, agreed = make(None), Agreed()
        run.coordinator.replication = agreed  # type: ignore[assignment]  # no more is asked of it
        async with asyncio.timeout(30), keeping_steps(run, job):
            await asyncio.sleep(0.2)
            assert agreed.entries == [], "before the run has begun there is nothing to know"
            run.publish(RunBegan(0, 1, 1.0))
            for event in (RunStepped(record(1, 1.0)), RunSaved(1, 0.1, 5), RunSaved(2, 0.1, 5, "the disk is full")):
                run.publish(event)
            while not agreed.entries or agreed.entries[-1].trained.step < 1:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            where = f"{HOST}:{Path(job.output_dir).resolve()}"
            known = replace_steps(after(job, 1), saved=1, written=where)
            assert agreed.entries[-1] == StepsTrained(known)
            count = len(agreed.entries)
            await asyncio.sleep(0.3)
            assert len(agreed.entries) == count, "what is known is not told again"
            run.publish(RunBegan(1, 1, 1.0, origin="memory"))
            run.publish(RunStepped(record(2, 1.0)))
            while len(agreed.entries) == count:
                await asyncio.sleep(0.01)
            agreed.is_deposed = True
            run.publish(RunStepped(record(3, 1.0)))
            await asyncio.sleep(0.3)
        assert agreed.entries[-1] == StepsTrained(replace_steps(known, step=2))

    asyncio.run(scene())


def replace_steps(trained: TrainedSteps, **changes: object) -> TrainedSteps:
    return msgspec.structs.replace(trained, **changes)
