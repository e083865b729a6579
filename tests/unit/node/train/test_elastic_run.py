"""What the coordinator of a run that outlives its nodes does with losses and news, without any node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.models.families import save_model
from tests.support.training.runs import job_for
from tests.support.training.stand_in_trainer import record
from tests.unit.cluster.kits import facts
from tllm.cli.arguments.survey_settings import training_settings
from tllm.cluster.certificates import Authority
from tllm.cluster.messages import Done
from tllm.cluster.settings import PredictedSeconds, TrainSettings
from tllm.cluster.state import NodeJoined, NodeLost, Planned, RankReady
from tllm.core.errors import CapacityError, ClusterError, ConfigError, PlanError, TllmError
from tllm.core.memory import amount
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions
from tllm.node.coordinator.plan_selection import PlanChoice
from tllm.node.coordinator.survey import SurveyRequest
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery import recovery as recovery_module
from tllm.node.recovery.rank_placement import RankPlacement
from tllm.node.recovery.recovery import Policy
from tllm.node.train import elastic_run as elastic_run_module
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.run_progress import IN_VAIN
from tllm.node.train.training_work import TrainingWork
from tllm.planner.measured.survey import Survey
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.job.job_file import ResolvedJob
from tllm.training.job.job_parts import training_facts
from tllm.training.report.events import RunBegan, RunEnded, RunEvent, RunLostRank, RunResumed, RunStepped
from tllm.training.report.metrics import MetricsFile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


Make = Callable[..., ElasticRun]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[ElasticRun] = []

    def run(plan: str, nodes: str, **more: object) -> ElasticRun:
        config = read_config(model)
        spec = spec_from_config(config)
        resolved = ResolvedJob(job_for(model, tmp_path / "run", **more), {})
        work = TrainingWork(resolved, Plan.parse(plan, spec.num_layers), json.dumps(config))
        one = ElasticRun(work.workload(ClusterOptions(link_seconds=60.0)), Authority.create(), LOOPBACK)
        made.append(one)
        for node in nodes:
            one.coordinator.members.record(NodeJoined(node, facts(node), 0.0))
        if nodes:
            begin(one, one.coordinator.work.plan, nodes)
        return one

    yield run
    for one in made:
        one.coordinator.control_server.close()


def begin(run: ElasticRun, plan: Plan, nodes: str) -> None:
    run.coordinator.members.record(Planned(plan, tuple(nodes)))
    for node in nodes:
        run.coordinator.members.record(RankReady(node))


def lose(run: ElasticRun, node: str, error: TllmError | None = None) -> None:
    run.coordinator.members.record(NodeLost(node, "gone"))
    run.recovery.on_loss(node, error or ClusterError(f"{node} is gone"))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(limited())


async def told(run: ElasticRun, count: int) -> list[RunEvent]:
    news = run.events()
    return [await anext(news) for _ in range(count)]


def settings(run: ElasticRun) -> TrainSettings:
    assert isinstance(run.coordinator.work.settings, TrainSettings)
    return run.coordinator.work.settings


def test_ranks_outlive_each_other_and_mirror_what_can_be(make: Make) -> None:
    for plan, nodes, more in (
        ("pp=2", "ab", {}),
        ("dp=2", "ab", {"local_steps": 3}),
        ("dp=2", "ab", {"delay_steps": 1}),
        ("dp=2", "ab", {"gradient_compression": "int8"}),
    ):
        run = make(plan, nodes, **more)
        assert settings(run).outlives and settings(run).mirrored, more
    for plan, nodes, more in (
        ("pp=1", "a", {}),
        ("dp=2,servers=1", "abc", {}),
        ("pp=2", "ab", {"mirror_steps": 0}),
    ):
        run = make(plan, nodes, **more)
        assert settings(run).outlives and not settings(run).mirrored, plan


def test_who_has_no_seat_any_more_lends_its_memory(make: Make) -> None:
    run = make("dp=2,pp=2,zero=1", "abcd")
    lose(run, "b")
    plan, nodes = run.plan_on({0: "a", 2: "c", 3: "d"})
    assert (str(plan), nodes) == ("pp=2,tp=1+1,layers=2+2,zero=1", ("c", "d", "a"))
    begin(run, plan, "cda")
    lose(run, "a")
    assert run.state.is_ready and run.recovery.lost_ranks == 1, "nobody waits for one that only lent"


def test_a_plan_that_the_job_does_not_allow_is_passed_over(make: Make) -> None:
    run = make("dp=3,zero=3", "abc", global_batch_size=3)
    assert str(run.plan_on({0: "a", 1: "b"})[0]) == "pp=1,tp=1,layers=4,zero=3", "two would have unlike microbatches"
    with pytest.raises(PlanError, match="no rank is left"):
        run.plan_on({})


def test_news_say_who_was_lost_and_what_goes_on(make: Make) -> None:
    async def scene() -> None:
        run = make("pp=2", "ab")
        run.publish(RunBegan(0, 1, 1.0))
        run.publish(RunStepped(record(1, 2.0)))
        run.publish(RunStepped(record(2, 2.0)))
        lose(run, "b")
        begin(run, Plan.parse("pp=1", 4), "a")
        run.publish(RunBegan(1, 1, 1.0, origin="memory"))
        *_, lost, _, again = await told(run, 6)
        assert lost == RunLostRank(2, "b", "b is gone")
        assert isinstance(again, RunResumed) and again.seconds > 0
        assert (again.step, again.again, again.nodes, again.origin) == (1, 1, ("a",), "memory")

    play(scene)


def test_it_is_said_when_both_copies_of_something_were_lost(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        run = make("dp=4", "abcd", gradient_compression="int8")
        for news in (RunBegan(0, 1, 1.0), *(RunStepped(record(step, 2.0)) for step in range(1, 6))):
            run.publish(news)
        lose(run, "b")
        lose(run, "c")
        begin(run, Plan.parse("dp=2", 4), "ad")
        run.publish(RunBegan(2, 1, 1.0, origin="save"))
        *_, again = await told(run, 10)
        assert isinstance(again, RunResumed) and (again.step, again.again, again.origin) == (2, 3, "save")
        assert "no step is whole in memory: goes on after step 2, 3 steps are lost" in caplog.text

    play(scene)


def test_a_rank_that_fails_by_itself_ends_the_run(make: Make) -> None:
    async def scene() -> None:
        run = make("pp=2", "ab")
        lose(run, "b", ConfigError("row 3 of the data is no row"))
        with pytest.raises(ConfigError, match="row 3"):
            await told(run, 1)
        assert run.coordinator.members.is_ending

    play(scene)


@pytest.mark.parametrize("final", ["", "run/final"])
def test_nodes_learn_whether_the_run_goes_on_another_time(final: str, make: Make) -> None:
    async def scene() -> None:
        run = make("pp=2", "ab")
        run.publish(RunEnded(2, final))
        for node in "ab":
            await run.acts(node)[Done](Done())
        assert run.coordinator.members.is_unfinished == (not final)
        assert await told(run, 1) == [RunEnded(2, final)]

    play(scene)


@pytest.mark.parametrize("steps", [False, True])
def test_losses_without_a_step_between_them_end_the_run(steps: bool, make: Make) -> None:
    async def scene() -> None:
        run = make("pp=2", "ab")
        run.publish(RunBegan(0, 1, 1.0))
        for number in range(IN_VAIN + 1):
            run.coordinator.members.record(NodeJoined("b", facts("b"), 0.0))
            begin(run, run.coordinator.work.plan, "ab")
            run.publish(RunBegan(number, 1, 1.0, origin="memory"))
            if steps:
                run.publish(RunStepped(record(number + 1, 2.0)))
            lose(run, "b")
        assert (run.fault is None) == steps
        if run.fault is not None:
            assert "5 losses in a row, and no step between them; the last: b is gone" in run.fault.message

    play(scene)


def test_a_node_that_joins_is_taken_in_when_a_step_has_ended(make: Make) -> None:
    run = make("pp=2", "ab")
    run.publish(RunBegan(0, 1, 1.0))
    lose(run, "b")
    begin(run, Plan.parse("pp=1", 4), "a")
    run.resume()
    run.publish(RunStepped(record(1, 2.0)))
    assert not run.recovery.can_grow()
    run.coordinator.members.record(NodeJoined("c", facts("c"), 0.0))
    assert not run.recovery.can_grow(), "within a step"
    run.publish(RunStepped(record(2, 2.0)))
    assert run.recovery.can_grow()


def test_a_move_whose_ranks_fail_before_a_step_is_taken_back(make: Make) -> None:
    """Under the plan before the same failure is the run's own."""
    run = make("dp=2", "ab")
    run.publish(RunBegan(0, 1, 1.0))
    known, foretold = (PredictedSeconds(plan, {"step": 7.0}) for plan in ("dp=2", "pp=2"))
    work = run.coordinator.work
    before = run.coordinator.work = replace(work, settings=msgspec.structs.replace(work.settings, predicted=known))
    run.move(Plan.parse("pp=2", 4), "ba", foretold)
    assert run.recovery.can_grow() and run.coordinator.work.plan.pp == 2 and settings(run).predicted == foretold
    run.publish(RunStepped(record(1, 2.0)))  # of the epoch that is to end
    begin(run, run.coordinator.work.plan, "ba")
    lose(run, "b", CapacityError("no memory"))
    assert (
        run.coordinator.work == before
        and run.fault is None
        and run.recovery.move.placement.fill("ab") == {0: "a", 1: "b"}
    )
    run.coordinator.members.record(NodeJoined("b", facts("b"), 0.0))
    begin(run, run.coordinator.work.plan, "ab")
    lose(run, "b", CapacityError("no memory"))
    assert run.fault is not None


def test_a_move_stands_once_a_step_is_done_under_it(make: Make) -> None:
    run = make("dp=2", "ab")
    run.publish(RunBegan(0, 1, 1.0))
    run.move(Plan.parse("pp=2", 4), "ab")
    begin(run, run.coordinator.work.plan, "ab")
    run.recovery.move.is_pending = False  # the epoch is open
    run.publish(RunStepped(record(1, 2.0)))
    assert not run.recovery.move.take_back("too late") and run.coordinator.work.plan.pp == 2


def join(run: ElasticRun, node: str, rank: int | None = None, memory: int = 2**33) -> None:
    own = msgspec.structs.replace(facts(node), memory_bytes=memory, is_given=True, is_shared=False)
    run.coordinator.members.record(NodeJoined(node, own, 0.0, epoch=3 if rank is not None else 0, rank=rank))


def test_a_node_that_comes_back_without_a_seat_lends_its_memory(make: Make) -> None:
    run = make("pp=2", "")
    for node, rank in (("a", 0), ("b", 1), ("c", 2), ("d", None)):
        join(run, node, rank)
    assert run.plan_on({0: "a", 1: "b"})[1] == ("a", "b", "c"), "d was never in the run"


def test_those_who_came_back_go_on_without_one_that_does_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_run_module, "BACK_SECONDS", 0.1)
    monkeypatch.setattr(recovery_module, "LOOK_SECONDS", 0.02)

    async def scene(*nodes: tuple[str, int | None], late: tuple[str, int | None], policy: Policy = "replan") -> bool:
        """Whether these go on, three of four; but for the last of them they do not."""
        run = make("pp=4", "")
        run.recovery.policy, run.coordinator.first = policy, ("local-0",)
        run.recovery.move.placement = RankPlacement(4, run.coordinator.first)
        waiting = asyncio.create_task(run.wait_for_nodes(None))
        for node, rank in nodes:
            join(run, node, rank)
        await asyncio.sleep(0.4)
        assert not waiting.done()
        join(run, *late)
        done, _ = await asyncio.wait([waiting], timeout=1.0 if policy == "wait" else 10.0)
        waiting.cancel()
        return bool(done) and waiting.result() == ("local-0", "a", "b")

    new, back, own = ("a", None), ("b", 2), ("local-0", None)
    assert asyncio.run(scene(new, own, late=back)), "those that are new wait for all"
    assert asyncio.run(scene(new, back, late=own)), "rank 0 reads the data, on this machine"
    assert not asyncio.run(scene(new, own, late=back, policy="wait")), "as is wanted"


def test_a_plan_that_is_given_is_not_foretold_for_fewer_nodes(make: Make) -> None:
    def choose(survey: Survey) -> tuple[Workload, Sequence[int]]:
        raise AssertionError("there is nothing to choose")

    run = make("pp=2", "")
    asked = SurveyRequest(run._spec, "train", training_settings(training_facts(run._job), (1,), "adamw", 2))
    run.coordinator.selection.choice = PlanChoice(asked, choose, is_given=True)
    assert asyncio.run(run.choose(("a",))) == ("a",) and run.coordinator.selection.choice is None


def test_with_all_back_nobody_is_waited_for(make: Make) -> None:
    async def scene() -> None:
        run = make("pp=2", "")
        for node, rank in (("a", None), ("b", 1)):
            join(run, node, rank)
        assert await run.wait_for_nodes(None) == ("a", "b")

    play(scene)


def test_what_a_command_that_was_killed_had_done_is_counted(make: Make, tmp_path: Path) -> None:
    """The first news of the next one say how far back it goes."""
    file = MetricsFile(tmp_path)
    for step in range(1, 8):
        file.write(record(step, 2.0))
    file.close()

    async def scene() -> None:
        for began, again in ((RunBegan(6, 1, 1.0, origin="memory"), 1), (RunBegan(4, 1, 1.0, origin="save"), 3)):
            run = make("pp=2", "ab", output_dir=str(tmp_path))
            run.publish(began)
            _, resumed = await told(run, 2)
            assert isinstance(resumed, RunResumed)
            assert (resumed.step, resumed.again, resumed.origin) == (began.step, again, began.origin)
        run = make("pp=2", "ab", output_dir=str(tmp_path))
        run.publish(RunBegan(7, 1, 1.0, origin="save"))
        run.publish(RunStepped(record(8, 2.0)))
        assert not any(isinstance(one, RunResumed) for one in await told(run, 2)), "nothing was lost"

    play(scene)


def test_copies_that_find_no_room_are_not_kept_and_that_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    run = make("pp=2", "")
    run.must_mirror = True
    sizes = [
        [
            rank.total
            for rank in training_bytes(run._spec, run.coordinator.work.plan, training_facts(run._job, mirrored))
        ]
        for mirrored in (False, True)
    ]
    (least, _), (most, other) = sizes
    assert least < most - 1
    join(run, "b", memory=other)
    join(run, "a", memory=most)
    run.before_epoch(run.coordinator.work.plan, "ab")
    assert settings(run).mirrored and not caplog.records
    for memory in (most - 1, least):
        join(run, "a", memory=memory)
        words = f"with copies of steps .* on a need .*, {amount(most - memory)} too little"
        with pytest.raises(CapacityError, match=words):
            run.before_epoch(run.coordinator.work.plan, "ab")
    assert asyncio.run(run.choose(("a", "b"))) == ("a", "b")
    run.must_mirror = False
    run.before_epoch(run.coordinator.work.plan, "ab")
    assert not settings(run).mirrored
    assert f"and it has {amount(least)}, {amount(most - least)} too little" in caplog.text
    join(run, "a", memory=least - 1)
    with pytest.raises(CapacityError, match=r"need .*, 1 B too little"):
        asyncio.run(run.choose(("a", "b")))


def test_copies_need_room_under_a_later_plan_too(make: Make) -> None:
    """Before the first step they are asked for when it is known which plan that has."""
    run = make("dp=3", "")
    bare = training_bytes(run._spec, Plan.parse("dp=2", 4), training_facts(run._job))
    for node in "ab":
        join(run, node, memory=max(rank.total for rank in bare))
    assert run.plan_on({0: "a", 1: "b"})[0].world_size == 2
    run.progress.has_begun = True
    with pytest.raises(CapacityError):
        run.plan_on({0: "a", 1: "b"})


def test_who_cannot_work_with_another_node_lends_it_no_memory_either(make: Make) -> None:
    """It was given that part again and again, which needs the same links, until the run was given up."""
    run = make("dp=3,zero=1", "abc", global_batch_size=6)
    run.recovery.left_out.note(("c",), "its memory is too small")
    assert run.plan_on({0: "a", 1: "b"})[1] == ("a", "b", "c"), "who has too little for a part may lend"
    run.recovery.left_out.note(("b", "c"), "nothing passes between them")
    assert run.plan_on({0: "a", 1: "b"})[1] == ("a", "b")
