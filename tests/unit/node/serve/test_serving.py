"""What a serving coordinator does with what nodes say, without any node."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.models.adapters import save_adapter
from tests.support.models.families import save_model
from tests.unit.cluster.kits import facts
from tests.unit.node.front_end.test_remote_engine import MODEL
from tllm.cluster.certificates import Authority
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.heartbeat import LATE_SECONDS
from tllm.cluster.messages import AdapterReady, Heartbeat, LoadAdapter, NodeFacts, Outputs, UnloadAdapter
from tllm.cluster.state import NodeHeard, NodeJoined, NodeLost, Planned, RankBroken, RankReady
from tllm.core.errors import CapacityError, ClusterError, ConfigError, TllmError, WeightsError
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions
from tllm.node.serve import serving
from tllm.node.serve.open_cluster import serving_workload
from tllm.node.serve.serving import Serving
from tllm.node.sources.node_source import Invitation, JoinLine
from tllm.planner.cost.cache_room import RUNTIME_BYTES
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.fixture
def cluster(model: Path) -> Iterator[Serving]:
    """Two nodes in epoch 1, ready."""
    work = serving_workload(model, "pp=2", EngineConfig(cache_tokens=256), ClusterOptions(link_seconds=1.0))
    cluster = Serving(work, Authority.create(), LOOPBACK)
    for node in "ab":
        cluster.coordinator.members.record(NodeJoined(node, facts(node), time.monotonic()))
    begin(cluster, "ab")
    yield cluster
    cluster.coordinator.control_server.close()


def begin(cluster: Serving, nodes: str) -> None:
    cluster.coordinator.members.record(Planned(cluster.coordinator.work.plan, tuple(nodes)))
    for node in nodes:
        cluster.coordinator.members.record(RankReady(node))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(limited())


def ask(cluster: Serving) -> asyncio.Task[Output]:
    request = Request(id="r", prompt_ids=(1,), params=SamplingParams())
    return asyncio.create_task(anext(cluster.submit(request)))  # type: ignore[arg-type]


def test_outputs_count_from_the_driver_of_this_epoch_alone(cluster: Serving) -> None:
    async def scene() -> None:
        first = ask(cluster)
        await asyncio.sleep(0)
        begin(cluster, "ba")
        for token, (node, epoch) in enumerate([("a", 1), ("b", 1), ("a", 2), ("b", 2)]):
            sent = cluster.acts(node)[Outputs](Outputs(epoch, (Output(request_id="r", token_ids=(token,)),)))
            assert isinstance(sent, Awaitable)
            await sent
        assert (await first).token_ids == (3,)

    play(scene)


def test_health_names_who_is_at_fault_and_stays_alive(cluster: Serving) -> None:
    cluster.recovery.is_open = True
    cluster.coordinator.members.record(RankBroken("b", "rank 0 went away"))
    cluster.recovery.on_break()
    assert (cluster.health().ready, cluster.health().node) == (False, "b")
    cluster.coordinator.members.record(NodeLost("a", "a is gone"))
    cluster.recovery.on_loss("a", ClusterError("a is gone"))
    health = cluster.health()
    assert (health.alive, health.ready, health.node, health.reason) == (True, False, "a", "a is gone")
    assert cluster.stats()["losses"] == 1


def test_health_names_who_is_late_before_who_was_lost_already(cluster: Serving) -> None:
    """The others begin anew without the lost one, and wait for the late one."""
    cluster.coordinator.members.record(NodeLost("a", "a is gone"))
    cluster.recovery.on_loss("a", ClusterError("a is gone"))
    assert cluster.health().node == "a"
    members = cluster.coordinator.members
    members.record(NodeJoined("b", facts("b"), members.now() - LATE_SECONDS - 1))
    health = cluster.health()
    assert health.node == "b" and "node b has been silent for 3.0 s" in health.reason


def test_the_epoch_that_is_said_to_begin_is_the_one_that_does(cluster: Serving) -> None:
    """After a loss the epoch that was over was said to begin, until the next one did."""

    async def begun(plan: Plan, nodes: list[str], on_progress: object) -> None:
        begin(cluster, "".join(nodes))

    cluster.coordinator.bring_up = begun  # type: ignore[method-assign, assignment]
    recovery = cluster.recovery
    assert recovery.doing().startswith("begins epoch 1: a ")
    asyncio.run(recovery.begin_epoch())
    assert recovery.doing() == "serves, epoch 2"
    recovery.on_break()
    assert recovery.doing() == "prepares epoch 3"


def test_a_failure_of_our_own_is_the_end(cluster: Serving) -> None:
    """A process that was only deposed stays alive, as it joins whoever followed it."""

    async def scene() -> None:
        first = ask(cluster)
        await asyncio.sleep(0)
        cluster.fail(ClusterError("the coordinator failed"))
        assert not cluster.health().alive
        for task in (first, ask(cluster)):
            with pytest.raises(ClusterError, match="the coordinator failed"):
                await task
        cluster.fail(Deposed("it coordinates no more"))
        health = cluster.health()
        assert (health.alive, health.ready, health.reason) == (True, False, "it coordinates no more")

    play(scene)


def test_nodes_without_the_memory_are_not_given_the_plan(cluster: Serving) -> None:
    """Each node says that its machine has 1 GiB, and of one machine they all count together."""
    cluster.check_room(cluster.coordinator.work.plan, ["a", "b"])
    for node in "cd":
        cluster.coordinator.members.record(NodeJoined(node, facts(node), 0.0))
    with pytest.raises(CapacityError, match=r"the ranks on box need .* and it has 1.00 GiB, "):
        cluster.check_room(Plan.parse("pp=4", 4), list("abcd"))


def test_memory_that_nodes_were_given_is_each_one_s_own(cluster: Serving) -> None:
    """On one machine, two nodes that were given 1 GiB each have 2; one that was given too little is named with both."""
    for node, memory in (("c", 2**30), ("d", 2**30), ("e", 2**20)):
        own = given(node, memory)
        cluster.coordinator.members.record(NodeJoined(node, own, 0.0))
    cluster.check_room(Plan.parse("pp=4", 4), list("abcd"))
    with pytest.raises(CapacityError, match=r"the ranks on e need .* and it has 1.0 MiB, "):
        cluster.check_room(Plan.parse("pp=2", 4), list("ae"))


def test_the_cache_and_a_batch_count_to_the_byte(cluster: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 of the plan needs is room enough, and one byte less is not."""
    needed = list[int]()
    cluster.coordinator.members.record(NodeJoined("c", given("c", 1), 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(serving, "check_machines", lambda needs, machines: needed.extend(needs))
        cluster.check_room(cluster.coordinator.work.plan, "cb")
    need = needed[0]
    (first, _) = rank_bytes(cluster._spec, cluster.coordinator.work.plan, "float32")
    assert need - RUNTIME_BYTES - first.weights - 256 * first.kv_per_token > 1024 * 4 * cluster._spec.hidden_size * 4
    cluster.coordinator.members.record(NodeJoined("c", given("c", need), 0.0))
    cluster.check_room(cluster.coordinator.work.plan, "cb")
    cluster.coordinator.members.record(NodeJoined("c", given("c", need - 1), 0.0))
    with pytest.raises(CapacityError, match=r"the ranks on c need .*, 1 B too little"):
        cluster.check_room(cluster.coordinator.work.plan, "cb")


def test_memory_that_is_given_to_a_machine_is_shared_by_its_workers(cluster: Serving) -> None:
    for node in "cd":
        shared = msgspec.structs.replace(given(node, 700 * 2**20), is_shared=True)
        cluster.coordinator.members.record(NodeJoined(node, shared, 0.0))
    cluster.check_room(cluster.coordinator.work.plan, "cd")
    for node in "cd":
        shared = msgspec.structs.replace(given(node, 500 * 2**20), is_shared=True)
        cluster.coordinator.members.record(NodeJoined(node, shared, 0.0))
    with pytest.raises(CapacityError, match=r"the ranks on box need .* and it has 500.0 MiB, "):
        cluster.check_room(cluster.coordinator.work.plan, "cd")


def given(node: str, memory: int) -> NodeFacts:
    return msgspec.structs.replace(facts(node), is_given=True, is_shared=False, memory_bytes=memory)


def test_a_newcomer_that_cannot_take_part_is_left_out(cluster: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    async def bring_up(plan: Plan, nodes: tuple[str, ...], on_progress: object) -> None:
        seen.append(nodes)
        assert plan.world_size == len(nodes)
        cluster.coordinator.members.record(Planned(plan, nodes))
        if "c" in nodes:
            raise WeightsError("the files of c are torn")
        for node in nodes:
            cluster.coordinator.members.record(RankReady(node))

    monkeypatch.setattr(cluster.coordinator, "bring_up", bring_up)
    monkeypatch.setattr("tllm.node.recovery.recovery.BLAME_SECONDS", 0.0)

    async def scene() -> None:
        cluster.coordinator.members.record(NodeLost("b", "gone"))
        cluster.recovery.on_loss("b", ClusterError("gone"))
        await cluster.recovery.begin_epoch()
        cluster.coordinator.members.record(NodeJoined("c", facts("c"), 0.0))
        assert cluster.recovery.can_grow()
        await cluster.recovery.begin_epoch()
        assert seen == [("a",), ("a", "c"), ("a",)]
        assert cluster.health().ready and not cluster.recovery.can_grow()
        cluster.coordinator.members.record(NodeLost("c", "gone"))
        cluster.recovery.on_loss("c", ClusterError("gone"))
        cluster.coordinator.members.record(NodeJoined("c", facts("c"), 0.0))
        assert cluster.recovery.can_grow(), "mended, it may try again"

    play(scene)


def test_a_node_that_is_lost_while_the_work_begins_is_asked_for_again(
    cluster: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work went on with fewer, and its operator had no line by which another could join."""
    said: list[tuple[int, str]] = []
    coordinator = cluster.coordinator
    coordinator.invitation = Invitation(JoinLine(lambda *line: said.append(line[:2])), "here:1", 2)
    coordinator.invite(2)
    for token in list(coordinator.invitation.tokens):  # both have come by it
        for _ in range(2):
            coordinator.tokens.redeem(token.secret, time.time())

    async def bring_up(plan: Plan, nodes: tuple[str, ...], on_progress: object) -> None:
        if "b" in nodes:
            coordinator.members.record(NodeLost("b", "gone"))
            cluster.recovery.on_loss("b", ClusterError("gone"))
            raise ClusterError("b went away before it answered")

    monkeypatch.setattr(coordinator, "bring_up", bring_up)
    monkeypatch.setattr("tllm.node.recovery.recovery.BLAME_SECONDS", 0.0)
    play(lambda: cluster.recovery.begin(("a", "b")))
    assert cluster.recovery.is_open and said == [(2, "here:1"), (1, "here:1")]


def test_who_asks_while_it_moves_is_not_sent_away(cluster: Serving) -> None:
    cluster.recovery.is_open = True
    cluster.move(Plan.parse("pp=1", 4), ["b"])
    cluster.recovery.is_open = False
    assert cluster.health().ready
    cluster.coordinator.members.record(NodeLost("a", "a is gone"))
    cluster.recovery.on_loss("a", ClusterError("a is gone"))
    assert not cluster.health().ready, "a loss may take long"


def test_a_move_that_nodes_have_no_memory_for_changes_nothing(cluster: Serving) -> None:
    for node in "cd":
        cluster.coordinator.members.record(NodeJoined(node, facts(node), 0.0))
    with pytest.raises(CapacityError):
        cluster.move(Plan.parse("pp=4", 4), list("abcd"))
    assert cluster.coordinator.work.plan.pp == 2 and not cluster.recovery.can_grow()


def test_what_is_served_is_known_before_a_plan_is_chosen_and_after(cluster: Serving) -> None:
    """Whoever takes this process's place while the first epoch loads serves the same."""
    served = msgspec.structs.replace(MODEL, max_model_len=1)
    cluster.coordinator.work = dataclasses.replace(cluster.coordinator.work, served=served)
    chosen = dataclasses.replace(cluster.coordinator.work, served=None)
    assert cluster.adopt(chosen).served == msgspec.structs.replace(served, max_model_len=cluster.max_model_len)


def test_another_loss_while_the_epoch_begins_is_waited_for_as_the_first_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work was given up at once, although others are to be waited for."""
    work = serving_workload(model, "pp=2", EngineConfig(cache_tokens=256), ClusterOptions(link_seconds=1.0))
    cluster = Serving(work, Authority.create(), LOOPBACK, policy="wait")
    members, began = cluster.coordinator.members, list[tuple[str, ...]]()
    for node in "ab":
        members.record(NodeJoined(node, facts(node), 0.0))

    async def bring_up(plan: Plan, nodes: tuple[str, ...], on_progress: object) -> None:
        began.append(nodes)
        members.record(Planned(plan, nodes))
        if len(began) == 1:
            members.record(NodeLost("b", "gone"))
            cluster.recovery.on_loss("b", ClusterError("gone"))
            raise ClusterError("b went away before it answered")
        for node in nodes:
            members.record(RankReady(node))

    monkeypatch.setattr(cluster.coordinator, "bring_up", bring_up)
    monkeypatch.setattr("tllm.node.recovery.recovery.BLAME_SECONDS", 0.0)

    async def scene() -> None:
        cluster.recovery.take_up()
        beginning = asyncio.create_task(cluster.recovery.begin_epoch())
        await asyncio.sleep(0.1)
        assert not beginning.done() and cluster.fault is None
        members.record(NodeJoined("b", facts("b"), 0.0))
        await members.notify()
        await beginning
        assert began == [("a", "b")] * 2 and cluster.is_open

    play(scene)
    cluster.coordinator.control_server.close()


def test_an_adapter_that_is_loaded_while_a_node_is_lost_waits_for_the_next_epoch(
    cluster: Serving, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was a KeyError, by the name of the lost node."""
    monkeypatch.setattr("tllm.node.serve.lora_adapters.LOAD_SECONDS", 0.1)
    cluster.recovery.is_open = True
    cluster.coordinator.members.record(NodeLost("b", "gone"))
    cluster.recovery.on_loss("b", ClusterError("gone"))
    with pytest.raises(ClusterError, match="does not serve now"):
        asyncio.run(cluster.adapters.load("x", str(save_adapter(model, tmp_path / "x"))))
    assert not list(cluster.coordinator.weights.adapters), "and nothing is kept of it"


@pytest.mark.parametrize("refusal", [CapacityError("out of memory", "give it more"), ClusterError("it is too slow")])
def test_an_adapter_that_a_node_refuses_leaves_its_rank_as_it_is(
    cluster: Serving, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: TllmError
) -> None:
    """Its refusal counted as one of its part: all requests paused, and the next epoch began. Later one that might also
    have come of a lost node was asked for four times, each as long as the first."""
    monkeypatch.setattr("tllm.node.serve.lora_adapters.CHANGE_SECONDS", 0.1)

    class Lacking:
        def __init__(self, node: str) -> None:
            self.node, self.asked, self.posted = node, 0, list[Any]()

        async def ask(self, message: LoadAdapter, seconds: float) -> AdapterReady:
            self.asked += 1
            if self.node == "b":
                raise refusal
            return AdapterReady(0)

        def post(self, message: Any) -> None:
            self.posted.append(message)

    channels: dict[str, Any] = {node: Lacking(node) for node in "ab"}
    cluster.coordinator.members.channels = channels
    cluster.recovery.is_open = True
    with pytest.raises(type(refusal), match=rf"^node b \(rank 1, .*\): {refusal.message}"):
        asyncio.run(cluster.adapters.load("x", str(save_adapter(model, tmp_path / "x"))))
    assert cluster.health().ready and not list(cluster.coordinator.weights.adapters)
    assert [channels[node].asked for node in "ab"] == [1, 1]
    assert [type(message) for message in channels["a"].posted] == [UnloadAdapter], "who has it lets go of it"


def test_a_loss_is_one_where_nobody_can_be_asked_for_another_node(
    cluster: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that took no file by which another would find its way here ended the coordinator with the lost node."""

    def refuse(count: int, address: str, token: str) -> None:
        raise ConfigError("cannot write .join-1: No space left on device")

    cluster.coordinator.invitation = Invitation(JoinLine(refuse), "here:1", 2)
    cluster.recovery.take_up()
    cluster.recovery.is_open = True
    cluster.coordinator.members.record(NodeLost("b", "gone"))
    cluster.recovery.on_loss("b", ClusterError("gone"))
    assert not cluster.is_open and cluster.recovery.lost_ranks == 1
    assert "no other node is asked for: cannot write .join-1" in caplog.text


def test_a_server_that_was_suspended_is_not_said_to_stand_still_afterwards(cluster: Serving) -> None:
    """The coordinator's clock leaves its pauses out; under a load without a gap the server was unwell from then on."""
    members = cluster.coordinator.members
    now = members.now() - 600.0  # so long it was suspended
    members.surroundings = members.surroundings._replace(clock=lambda: now)

    async def scene() -> None:
        nonlocal now
        waiting = ask(cluster)
        await asyncio.sleep(0)
        now += 40.0
        for batches in (1.0, 2.0):
            members.record(NodeHeard("a", Heartbeat(stats={"batches": batches}), members.now()))
        assert cluster.health().seconds_since_step == 0.0
        now += 5.0
        assert cluster.health().seconds_since_step == 5.0
        waiting.cancel()

    play(scene)
