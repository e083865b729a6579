"""Who has a role beside the plan, who takes it after a loss, and what rank 0 is told; without any node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.models.families import save_model
from tests.support.training.runs import job_for
from tests.unit.cluster.kits import facts
from tllm.cluster.certificates import Authority
from tllm.cluster.messages import Heartbeat, Message, Progress, RoleAsker, RolePlaces, RoleTaken, TakeRole
from tllm.cluster.state import Member, NodeHeard, NodeJoined, NodeLost, Planned, RankLoading, RankReady
from tllm.core.errors import AuthError, ConfigError, LinkClosed, WeightsError
from tllm.node.answering.answering_team import BROKEN, team_number
from tllm.node.coordinator import membership
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.train import role_nodes, role_teams
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.training_work import TrainingWork
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job_file import ResolvedJob


class Node:
    """The coordinator's connection to one, which takes any role unless it is told to fail, or once with another."""

    def __init__(self, port: int) -> None:
        self.port, self.fails, self.distrusts, self.reaches_nobody, self.reads_on = port, False, False, False, False
        self.orders: list[TakeRole] = []
        self.told: dict[str, list[str]] = {}
        self.reading: dict[str, dict[str, Progress]] = {}
        self.asker = ""

    async def stream(self, order: TakeRole, seconds: float) -> AsyncIterator[Progress | RoleTaken]:
        self.orders.append(order)
        yield Progress(1, 2)
        if self.reads_on:
            await asyncio.Event().wait()
        if self.fails:
            raise WeightsError("there is no model.safetensors")
        if self.reaches_nobody:
            raise LinkClosed("rank 1 does not answer")
        if self.distrusts:
            self.distrusts, error = False, AuthError("it hung up in the middle of the handshake")
            error.peer = 1
            raise error
        yield RoleTaken(order.role, 0 if order.rank else self.port, order.team)

    def post(self, message: Message) -> None:
        if isinstance(message, RoleAsker):
            self.asker = message.node
            return
        assert isinstance(message, RolePlaces)
        self.told[message.role] = [f"{place.node}:{place.port}" for place in message.places]
        self.reading[message.role] = message.reading


class Scene:
    """A run of two roles whose nodes are called by letters; `a` has rank 0."""

    def __init__(self, model: Path, folder: Path, plan: str, **keys: Any) -> None:
        table = DistillationKeys(**{"teacher_model_name_or_path": str(model), "lmbda": 0.5, **keys})
        job = job_for(model, folder / "run", task="distill", distill=table)
        work = TrainingWork(ResolvedJob(job, {}), Plan.parse(plan, 4), json.dumps(read_config(model)))
        self.run = ElasticRun(work.workload(), Authority.create(), LOOPBACK)
        self.members, self.roles = self.run.coordinator.members, self.run.roles
        self.nodes: dict[str, Node] = {}

    async def join(self, *names: str, had: RoleTaken | None = None, memory: int = 2**30, **faults: bool) -> None:
        for name in names:
            self.nodes[name] = Node(ord(name[0]))
            for fault, is_there in faults.items():
                setattr(self.nodes[name], fault, is_there)
            self.members.channels[name] = self.nodes[name]  # type: ignore[assignment]
            found = msgspec.structs.replace(facts(name), memory_bytes=memory)
            self.members.record(NodeJoined(name, found, 0.0, role=had))
        await self.settle()

    async def lose(self, name: str) -> None:
        self.members.record(NodeLost(name, "gone"))
        await self.settle()

    async def settle(self) -> None:
        await self.members.notify()
        await self.rest()

    async def rest(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)

    def having(self, role: str) -> list[str]:
        return [one.node for one in self.run.state.living if one.role == role and one.answers_at]

    def begin(self, nodes: str) -> None:
        """An epoch with these ranks, of which rank 0 has been told whom it may ask."""
        plan = Plan.parse(f"dp={len(nodes)}", 4)
        self.members.record(Planned(plan, tuple(nodes)))
        self.run.check({})
        for node in nodes:
            self.members.record(RankReady(node))


@pytest.fixture(autouse=True)
def _no_thread_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the teacher's folder in a thread does it in the event loop here, so that all is done after `rest`."""

    async def here(function: Callable[..., Any], *values: Any) -> Any:
        await asyncio.sleep(0)
        return function(*values)

    monkeypatch.setattr(asyncio, "to_thread", here)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@contextlib.asynccontextmanager
async def playing(model: Path, folder: Path, plan: str, names: str, **nodes: Any) -> AsyncIterator[Scene]:
    """A scene in which the first epoch has begun, with those that have no role."""
    scene = Scene(model, folder, plan, **nodes)
    try:
        await scene.join(*names)
        reserved = scene.roles.reserve(tuple(names))
        async with scene.roles.beginning():
            scene.begin("".join(name for name in names if name not in reserved))
        async with scene.roles.kept(lambda: True):
            yield scene
    finally:
        scene.run.coordinator.control_server.close()


def play(scene: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(limited())


def test_who_joins_takes_the_role_of_a_lost_node_and_rank_0_is_told(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abc", teacher_nodes=(1,), rollout_nodes=("b",)) as one:
            assert (one.having("teacher"), one.having("rollout")) == (["c"], ["b"])
            first = one.nodes["a"]
            assert first.told == {"teacher": [f"c:{ord('c')}"], "rollout": [f"b:{ord('b')}"]}
            (order,) = one.nodes["c"].orders
            assert order.files and order.model == str(model) and json.loads(order.config)["model_type"] == "llama"
            assert "teacher" in one.run.coordinator.weights.beside, "who lacks its files can read them"
            await one.lose("c")
            assert first.told["teacher"] == []
            await one.join("d", fails=True)
            assert one.having("teacher") == [] and one.run.coordinator.nodes == ("a", "d"), "it may have a rank"
            await one.join("e")
            assert one.having("teacher") == ["e"] and first.told["teacher"] == [f"e:{ord('e')}"]
            one.begin("d")
            assert one.nodes["d"].told == {"teacher": [f"e:{ord('e')}"], "rollout": [f"b:{ord('b')}"]}
            assert (one.having("teacher"), one.having("rollout")) == (["e"], ["b"]), "an epoch takes no role away"
            askers = {name: one.nodes[name].asker for name in "bcde"}
            assert askers == {"b": "d", "c": "a", "d": "", "e": "d"}, "who had a role then was told who asks"

    play(scene)


def test_who_reads_a_model_keeps_no_other_from_a_role(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rank 0 is told how far it has read, as long as it reads."""
    monkeypatch.setattr(role_nodes, "LOOK_SECONDS", 0.005)

    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abc", teacher_nodes=(1,), rollout_nodes=("b",)) as one:
            for name in "bc":
                await one.lose(name)
            await one.join("d", reads_on=True)
            await one.join("b")
            assert one.nodes["d"].orders[0].role == "teacher" and one.having("teacher") == []
            assert one.having("rollout") == ["b"] and len(one.nodes["d"].orders) == 1
            reading = one.run.state.member("d")
            assert reading is not None and (reading.phase, reading.progress) == ("loading", Progress(1, 2))
            first = one.nodes["a"]
            assert first.reading == {"teacher": {"d": Progress(1, 2)}, "rollout": {}}
            one.members.record(RankLoading("d", Progress(2, 2)))  # which wakes nobody
            await one.rest()
            assert first.reading["teacher"] == {"d": Progress(2, 2)}
            await one.lose("d")
            assert first.reading["teacher"] == {}

    play(scene)


def test_who_is_named_for_a_role_that_lacks_it_takes_no_other(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abcd", teacher_nodes=("c", "d"), rollout_nodes=(1,)) as one:
            await one.lose("b")
            await one.lose("d")
            await one.join("d")
            assert (one.having("teacher"), one.having("rollout")) == (["c", "d"], [])
            await one.join("b")
            assert (one.having("teacher"), one.having("rollout")) == (["c", "d"], ["b"])

    play(scene)


def test_nodes_that_have_one_teacher_together_answer_as_long_as_all_are_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_nodes, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(role_teams, "FIRST_SECONDS", 0.02)

    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abcde", teacher_nodes=(4,), teacher_plan="pp=2") as one:
            assert one.having("teacher") == ["b", "d"], "the first of each two"
            orders = [one.nodes[name].orders[-1] for name in "bcde"]
            assert [order.rank for order in orders] == [0, 1, 0, 1] and all(order.plan for order in orders)
            assert [[place.node for place in order.places] for order in orders[::2]] == [["b", "c"], ["d", "e"]]
            first = one.nodes["a"]
            await one.lose("c")
            assert first.told["teacher"] == [f"d:{ord('d')}"], "half of a teacher says nothing"
            await one.join("f")
            again = [one.nodes[name].orders[-1] for name in "bf"]
            assert [order.rank for order in again] == [0, 1] and again[0].team == again[1].team
            assert again[0].team not in {order.team for order in orders}, "no wire of before is taken for theirs"
            assert first.told["teacher"] == [f"b:{ord('b')}", f"d:{ord('d')}"]
            broken = Heartbeat(stats={BROKEN: team_number(orders[3].team)})
            one.nodes["d"].distrusts = True
            one.members.record(NodeHeard("e", broken, 1.0))  # which wakes nobody
            await one.rest()
            assert one.nodes["e"].orders[-1].team not in {order.team for order in orders}, "links broke, no node"
            assert len(one.nodes["e"].orders) == 3 == len(one.nodes["d"].orders), "twice, as d is not at fault alone"
            assert len(one.having("teacher")) == 2

    play(scene)
    three = Scene(model, tmp_path, "pp=1", teacher_nodes=(3,), teacher_plan="pp=2")
    with pytest.raises(ConfigError, match=r"gives 3 nodes, and by distill.teacher_plan = 'pp=2' each teacher takes 2"):
        three.roles.reserve(("a", "b", "c", "d"))
    three.run.coordinator.control_server.close()


def test_a_team_is_what_it_was_under_the_next_coordinator_and_ranks_are_those_of_the_names(
    model: Path, tmp_path: Path
) -> None:
    async def scene() -> None:
        one = Scene(model, tmp_path, "pp=1", teacher_nodes=("c", "b"), teacher_plan="tp=2,shares=1:3")
        is_open = False
        await one.join("a")
        async with one.roles.kept(lambda: is_open):
            await one.join("b", had=RoleTaken("teacher", 0, "cluster/teacher/1"))
            await one.join("c", had=RoleTaken("teacher", 7, "cluster/teacher/1"))
            one.begin("a")
            is_open = True
            await one.settle()
            assert one.having("teacher") == ["c"] and not one.nodes["b"].orders, "it answers, and reads nothing anew"
            await one.lose("c")
            assert one.nodes["a"].told["teacher"] == []
            await one.join("c")
            ranks = {name: one.nodes[name].orders[-1].rank for name in "bc"}
            assert ranks == {"c": 0, "b": 1}, "b has room for the larger share"
        one.run.coordinator.control_server.close()

    play(scene)


def test_nodes_that_cannot_reach_each_other_are_left_alone_for_longer_each_time_and_others_take_their_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(role_nodes, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(role_teams, "FIRST_SECONDS", 0.01)

    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abc", teacher_nodes=(2,), teacher_plan="pp=2") as one:
            await one.lose("c")
            await one.join("d")
            assert len(one.nodes["b"].orders) == 2
            one.nodes["d"].reaches_nobody = True
            broken = Heartbeat(stats={BROKEN: team_number(one.nodes["d"].orders[-1].team)})
            one.members.record(NodeHeard("b", broken, 1.0))
            began = time.monotonic()
            while len(one.nodes["d"].orders) < 5:
                await asyncio.sleep(0.005)
            tried = len(one.nodes["d"].orders) - 1
            most = 1 + math.log2(1 + (time.monotonic() - began) / 0.01)
            assert tried <= most, "each time after twice as long"
            assert "rank 1 does not answer; b with d is tried again in 0.02 s at the earliest" in caplog.text
            await one.join("e")
            while one.having("teacher") != ["b"]:
                await asyncio.sleep(0.005)
            assert [order.places[1].node for order in one.nodes["b"].orders[-1:]] == ["e"]
            assert one.having("teacher") == ["b"] and one.run.coordinator.nodes == ("a", "d"), "d may have a rank"

    play(scene)
    now, teams = (
        [0.0],
        [[Member(facts=facts("b"), heard=0.0)], [Member(facts=msgspec.structs.replace(facts("b"), pid=7), heard=0.0)]],
    )
    failed = role_teams.FailedTeams(lambda: now[0])
    waits = [failed.failed(teams[0]) for _ in range(20)]
    assert waits[:3] == [0.01, 0.02, 0.04] and waits[-1] == role_teams.MOST_SECONDS
    assert not failed.may_try(teams[0]) and failed.may_try(teams[1]), "a process that is new"
    now[0] = role_teams.MOST_SECONDS
    assert failed.may_try(teams[0])
    failed.met(teams[0])
    assert failed.failed(teams[0]) == 0.01


@pytest.mark.parametrize(
    ("fault", "phases"),
    [("reaches_nobody", {"b": "assigned", "d": "assigned"}), ("fails", {"b": "assigned"})],
)
def test_those_of_a_team_that_did_not_come_together_are_not_said_to_load(
    fault: str, phases: dict[str, str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_nodes, "LOOK_SECONDS", 0.005)

    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abc", teacher_nodes=(2,), teacher_plan="pp=2") as one:
            await one.lose("c")
            await one.join("d", **{fault: True})
            assert {member.node: member.phase for member in one.run.state.living if member.role} == phases

    play(scene)


def test_a_node_that_nobody_reaches_keeps_no_others_from_their_role(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_nodes, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(role_nodes, "TEAMS_LOOKED_AT", 2)
    monkeypatch.setattr(role_teams, "FIRST_SECONDS", 0.01)

    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abc", teacher_nodes=(2,), teacher_plan="pp=2") as one:
            one.nodes["b"].reaches_nobody = True
            await one.lose("c")
            await one.join("d", "e", "f")
            while not one.having("teacher"):
                await asyncio.sleep(0.005)
            await one.rest()
            assert "b" not in one.having("teacher")
            assert len(one.nodes["b"].orders) <= 4, "one of before, and no more than one with each of the others"

    play(scene)


def test_a_team_of_which_one_is_lost_is_not_waited_for_until_the_others_have_read_their_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_nodes, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(role_teams, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(membership, "ANSWER_SECONDS", 0.01)

    async def scene() -> None:
        async with playing(model, tmp_path, "pp=1", "abc", teacher_nodes=(2,), teacher_plan="pp=2") as one:
            one.nodes["b"].reads_on = True
            await one.lose("c")
            await one.join("d", reaches_nobody=True)
            while len(one.nodes["d"].orders) < 2:
                await asyncio.sleep(0.005)
            one.nodes["b"].reads_on = one.nodes["d"].reaches_nobody = False
            while one.having("teacher") != ["b"]:
                await asyncio.sleep(0.005)

    play(scene)


def test_who_failed_most_is_taken_last_until_it_is_gone_or_comes_together() -> None:
    now, names = [0.0], "bcdefghijklmn"
    members = [Member(facts=facts(name), heard=0.0, role="teacher" if name < "e" else None) for name in names]
    failed, tried = role_teams.FailedTeams(lambda: now[0]), list[str]()

    def take() -> list[Member]:
        teams = role_teams.possible_teams(failed.fewest_first(members), 3, 12)
        team = next(team for team in teams if failed.may_try(team))
        tried.append("".join(one.node for one in team))
        return list(team)

    failed.failed(take())
    failed.failed([members[0], *take()[:2]])
    take()
    assert tried == ["bcd", "efg", "ghi"], "none of those of before"
    assert [one.node for one in failed.fewest_first(members)][-1] == "b", "the one that was in both"
    failed.met(members[:3])
    assert failed.fewest_first(members)[:3] == members[:3]
    failed.forget_gone(members[:4])
    assert failed.fewest_first(members[3:])[:2] == members[4:6], "e is there still, and f is forgotten"


def test_teams_of_whom_few_may_be_without_a_role_are_found_at_once() -> None:
    members = [Member(facts=facts(name), heard=0.0, role="teacher" if name in "cf" else None) for name in "bcdef"]
    for size, spare in product(range(1, 6), range(5)):
        every = [team for team in combinations(members, size) if sum(one.role is None for one in team) <= spare]
        assert list(role_teams.possible_teams(members, size, spare)) == every
    crowd = [Member(facts=facts(f"n{number}"), heard=0.0) for number in range(200)]
    assert next(role_teams.possible_teams([*crowd, *members[1::3]], 8, 5), None) is None
    found = next(role_teams.possible_teams([*crowd, *members[1::3]], 8, 6))
    assert [one.node for one in found[-2:]] == ["c", "f"] and found[:6] == tuple(crowd[:6])


def test_who_has_more_memory_gets_the_larger_part() -> None:
    team = [
        Member(facts=msgspec.structs.replace(facts(name), memory_bytes=size), heard=0.0)
        for name, size in (("b", 2), ("c", 9), ("d", 5))
    ]
    for text, order in (
        ("tp=3,shares=1:2:3", "bdc"),
        ("tp=3,shares=3:2:1", "cdb"),
        ("pp=2,tp=1+2,layers=4+8", "bcd"),
        ("pp=3,layers=2+9+1", "dcb"),
        ("pp=3", "bcd"),
    ):
        plan = Plan.parse(text, 12)
        assert "".join(one.node for one in role_teams.larger_parts_first(team, plan)) == order, text
    alike = [msgspec.structs.replace(one, facts=facts(one.facts.node)) for one in team]
    assert role_teams.larger_parts_first(alike, Plan.parse("tp=3,shares=1:2:3", 12)) == alike


def test_who_takes_the_place_of_one_that_is_named_gets_the_part_that_it_has_room_for(
    model: Path, tmp_path: Path
) -> None:
    async def scene() -> None:
        keys: Any = dict(teacher_nodes=("b", "c"), teacher_plan="pp=2,layers=3+1")
        async with playing(model, tmp_path, "pp=1", "abc", **keys) as one:
            assert [one.nodes[name].orders[-1].rank for name in "bc"] == [0, 1], "as they are named"
            await one.lose("b")
            await one.join("d", memory=2**34)
            assert [one.nodes[name].orders[-1].rank for name in "dc"] == [0, 1]
            assert one.having("teacher") == ["d"]

    play(scene)


def test_the_name_of_a_team_ends_in_its_number() -> None:
    def came(name: str) -> str:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(RoleTaken("teacher", 0, name)), type=RoleTaken).team

    assert came("") == "" and team_number(came("c/teacher/000000ff")) == 255
    for name in ("c", "c/teacher/", "c/teacher/0000-0ff", "c/teacher/000000ff\n"):
        with pytest.raises(msgspec.ValidationError):  # it would end the run that this node is to answer
            came(name)


def test_the_plan_comes_before_a_role_that_somebody_has(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with playing(model, tmp_path, "dp=2", "abcd", rollout_nodes=(2,)) as one:
            assert one.having("rollout") == ["c", "d"] and one.run.coordinator.nodes == ("a", "b")
            await one.lose("b")
            one.begin("a")
            await one.lose("d")
            await one.join("e")
            assert one.having("rollout") == ["c"], "the plan lacks a rank"
            await one.join("f")
            assert one.having("rollout") == ["c", "f"]
            await one.lose("c")
            await one.lose("f")
            assert one.having("rollout") == ["e"], "nobody else samples"

    play(scene)


def test_who_had_a_role_keeps_it_under_the_next_coordinator_unless_it_is_that_itself(
    model: Path, tmp_path: Path
) -> None:
    async def scene() -> None:
        one = Scene(model, tmp_path, "pp=1", teacher_nodes=(2,))
        one.run.coordinator.first = ("a",)
        for name, role in (("a", "teacher"), ("b", "teacher"), ("c", "rollout")):
            one.members.record(NodeJoined(name, facts(name), 0.0, 3, None, RoleTaken(role, 7)))  # type: ignore[arg-type]
            one.run.acts(name)
        assert one.having("teacher") == ["b"] and one.run.coordinator.nodes == ("a", "c")
        assert one.roles.reserve(("a", "c")) == {"c"}, "one more is to teach"
        one.run.coordinator.control_server.close()

    play(scene)


def test_a_teacher_without_weights_ends_the_run_before_any_rank_is_built(model: Path, tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    shutil.copy(model / "config.json", tmp_path / "teacher")

    async def scene() -> None:
        keys: Any = dict(teacher_nodes=(1,), teacher_model_name_or_path=str(tmp_path / "teacher"))
        with pytest.raises(WeightsError, match=r"the teacher's folder .*teacher has no files of weights"):
            async with playing(model, tmp_path, "pp=1", "ab", **keys):
                raise AssertionError("it has begun")

    play(scene)


def test_a_named_node_that_joins_later_than_others_is_waited_for_and_then_refused_by_name(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        one = Scene(model, tmp_path, "dp=2", teacher_nodes=("late",), rollout_nodes=("b",))
        await one.join("a", "b", "c", "d")
        gathering = asyncio.create_task(one.run.nodes_to_begin(20))
        await one.settle()
        assert not gathering.done(), "there are enough nodes, and one of them is named and not here"
        assert "waiting for late, which distill.teacher_nodes names, for 20 s at most" in caplog.text
        await one.join("late")
        nodes = await gathering
        assert await one.run.choose(nodes) == ("a", "c")
        assert {member.node: member.role for member in one.run.state.living if member.role is not None} == {
            "late": "teacher",
            "b": "rollout",
        }
        one.run.coordinator.control_server.close()
        never = Scene(model, tmp_path, "dp=2", teacher_nodes=("never",))
        await never.join("a", "b", "c")
        with pytest.raises(ConfigError, match=r"'never', which has not joined within 0\S* s; the nodes are a, b, c"):
            await never.run.nodes_to_begin(0.05)
        never.run.coordinator.control_server.close()

    play(scene)


def test_names_that_cannot_be_are_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    for nodes, why in (
        (("x",), "distill.teacher_nodes names 'x', and the nodes are a, b"),
        (("a",), "distill.teacher_nodes names a, the first node, which has the data and trains"),
    ):
        scene = Scene(model, tmp_path, "pp=1", teacher_nodes=nodes)
        with pytest.raises(ConfigError, match=why):
            scene.roles.reserve(("a", "b"))
        scene.run.coordinator.control_server.close()
