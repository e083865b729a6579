"""Who has a role beside the plan, who takes it after a loss, and what rank 0 is told; without any node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.families import save_model
from tests.support.training.runs import job_for
from tests.unit.cluster.kits import facts
from tllm.cluster.certificates import Authority
from tllm.cluster.messages import Message, RoleAsker, RolePlaces, RoleTaken, TakeRole
from tllm.cluster.state import NodeJoined, NodeLost, Planned, RankReady
from tllm.core.errors import ConfigError, WeightsError
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.training_work import TrainingWork
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job_file import ResolvedJob


class Node:
    """The coordinator's connection to one, which takes any role unless it is told to fail."""

    def __init__(self, port: int) -> None:
        self.port, self.fails = port, False
        self.orders: list[TakeRole] = []
        self.told: dict[str, list[str]] = {}
        self.asker = ""

    async def ask(self, order: TakeRole, seconds: float) -> RoleTaken:
        self.orders.append(order)
        if self.fails:
            raise WeightsError("there is no model.safetensors")
        return RoleTaken(order.role, self.port)

    def post(self, message: Message) -> None:
        if isinstance(message, RoleAsker):
            self.asker = message.node
            return
        assert isinstance(message, RolePlaces)
        self.told[message.role] = [f"{place.node}:{place.port}" for place in message.places]


class Scene:
    """A run of two roles whose nodes are called by letters; `a` has rank 0."""

    def __init__(self, model: Path, folder: Path, plan: str, **keys: Any) -> None:
        table = DistillationKeys(**{"teacher_model_name_or_path": str(model), "lmbda": 0.5, **keys})
        job = job_for(model, folder / "run", task="distill", distill=table)
        work = TrainingWork(ResolvedJob(job, {}), Plan.parse(plan, 4), json.dumps(read_config(model)))
        self.run = ElasticRun(work.workload(), Authority.create(), LOOPBACK)
        self.members, self.roles = self.run.coordinator.members, self.run.roles
        self.nodes: dict[str, Node] = {}

    async def join(self, *names: str, fails: bool = False) -> None:
        for name in names:
            self.nodes[name] = Node(ord(name[0]))
            self.nodes[name].fails = fails
            self.members.channels[name] = self.nodes[name]  # type: ignore[assignment]
            self.members.record(NodeJoined(name, facts(name), 0.0))
        await self.settle()

    async def lose(self, name: str) -> None:
        self.members.record(NodeLost(name, "gone"))
        await self.settle()

    async def settle(self) -> None:
        await self.members.notify()
        for _ in range(20):
            await asyncio.sleep(0.005)  # a thread reads the teacher's folder

    def having(self, role: str) -> list[str]:
        return [one.node for one in self.run.state.living if one.role == role and one.answers_at]

    def begin(self, nodes: str) -> None:
        """An epoch with these ranks, of which rank 0 has been told whom it may ask."""
        plan = Plan.parse(f"dp={len(nodes)}", 4)
        self.members.record(Planned(plan, tuple(nodes)))
        self.run.check({})
        for node in nodes:
            self.members.record(RankReady(node))


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
