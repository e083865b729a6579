"""A survey's questions and answers, where the test is the nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.unit.cluster.kits import facts, joined
from tests.unit.planner.measured.test_survey import SPEC, serving_node, survey_of
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.cluster.messages import DeviceFacts, Findings, NodeFacts, Probe
from tllm.cluster.settings import SurveySettings
from tllm.cluster.state import NodeJoined, NodeLost, Planned, apply
from tllm.core.errors import ClusterError
from tllm.node.coordinator import survey_cluster
from tllm.node.coordinator.survey import Examiner, SurveyRequest, in_time
from tllm.node.coordinator.survey_cluster import survey_here
from tllm.node.machine.machine_facts import NetworkPath, PathMeasurement
from tllm.node.roles.sum_latency import Met
from tllm.spec.plan import Plan

NODES = ("a", "b")
HOSTS = ("one", "other")
WORKS = (2e-3, 4e-3)
SETTINGS = SurveySettings(
    dtype="float32", length=8, rows=(8,), sequences=(1,), measure_seconds=0.1, way_seconds=0.1, link_seconds=1.0
)
ASKED = SurveyRequest(SPEC, "serve", SETTINGS)


class Stand:
    """The members of a cluster, whose nodes answer each probe by `answer(node, target)`; None: they go away.

    A turn of work and a sum takes them 6 ms.
    """

    def __init__(self, answer: Callable[[str, int], msgspec.Struct | bytes | None]) -> None:
        self.answer = answer
        self.examiner = Examiner(self, SETTINGS)  # type: ignore[arg-type]
        self.asked: list[tuple[str, int | None]] = []
        self.met: list[tuple[str, int | None]] = []
        self.state = apply(joined(*NODES), Planned(Plan.parse("pp=2", 2), NODES))
        self.channels: dict[str, Any] = {node: self._channel(node) for node in NODES}

    def lose(self, node: str) -> None:
        """As `Membership` does: the channel is let go a little later, and nobody is notified of that."""
        self.state = apply(self.state, NodeLost(node, "its process has ended"))

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    def _channel(self, node: str) -> Any:
        stand = self

        class Channel:
            def post(self, probe: Probe) -> None:
                (stand.met if probe.meet else stand.asked).append((node, probe.target))
                if probe.target is None:
                    return
                found = (
                    Met(WORKS[probe.target], 2e-3, 6e-3, 1.5e7, 1e-9, 3e7)
                    if probe.meet
                    else stand.answer(node, probe.target)
                )
                if found is None:
                    stand.lose(node)
                else:
                    content = found if isinstance(found, bytes) else msgspec.json.encode(found)
                    stand.examiner.take(node, Findings(content))

        return Channel()


def well(node: str, target: int) -> msgspec.Struct:
    """What a node says that can be reached; it calls itself by another name."""
    if NODES[target] == node:
        return serving_node(node)
    measured = PathMeasurement(round_trip=2e-3, jitter=0.0, offset=0.0, bandwidth=1e7 * (1 + target))
    return NetworkPath(source="x", target="y", measured=measured)


def test_nodes_first_then_each_way_and_then_they_are_free() -> None:
    stand = Stand(well)
    survey = asyncio.run(stand.examiner.survey(NODES, HOSTS, ASKED))
    assert stand.asked == [("a", 0), ("b", 1), ("a", 1), ("b", 0), ("a", None), ("b", None)]
    assert [node.node for node in survey.nodes] == ["a", "b"]
    assert stand.met == [("a", 1), ("b", 0)], "both are told, and nothing else is measured meanwhile"
    assert [(way.source, way.target, way.latency, way.bandwidth, way.meeting) for way in survey.paths] == [
        (0, 1, 1e-3, 1.5e7, pytest.approx(2e-3 - 4096 / 1.5e7)),
        (1, 0, 1e-3, 1.5e7, pytest.approx(2e-3 - 4096 / 1.5e7)),
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda node, target: None if node == "b" else well(node, target), "b is gone: its process has ended"),
        (lambda node, target: b"{}", "sent findings that are none"),
        (
            lambda node, target: NetworkPath(source=node, target=node),
            "sent a NetworkPath where a SurveyedNode was asked for",
        ),
        (
            lambda node, target: (
                well(node, target) if NODES[target] == node else NetworkPath(source=node, target="z", fault="refused")
            ),
            "no way from a to b: refused",
        ),
    ],
)
def test_what_goes_wrong_is_named(answer: Any, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        asyncio.run(asyncio.wait_for(Stand(answer).examiner.survey(NODES, HOSTS, ASKED), 30.0))


@pytest.mark.parametrize("comes_anew", [False, True])
def test_a_node_that_went_while_others_were_measured_is_named(comes_anew: bool) -> None:
    """Who was asked next was a KeyError, and one that had come anew was waited for in vain."""
    stand = Stand(well)

    def answer(node: str, target: int) -> msgspec.Struct:
        if (node, target) == ("a", 1):
            stand.lose("b")
            stand.channels.pop("b")
            if comes_anew:
                stand.state = apply(stand.state, NodeJoined("b", facts("b"), 1.0))
                stand.channels["b"] = stand._channel("b")
        return well(node, target)

    stand.answer = answer
    with pytest.raises(ClusterError, match="b is gone"):
        asyncio.run(asyncio.wait_for(stand.examiner.survey(NODES, HOSTS, ASKED), 10.0))


class Slow(Stand):
    """Nodes that measure themselves for a moment. `most`: how many did so at once."""

    def __init__(self) -> None:
        super().__init__(well)
        self.busy = self.most = 0

    def _channel(self, node: str) -> Any:
        stand, at_once = self, super()._channel(node)

        class Channel:
            def post(self, probe: Probe) -> None:
                if probe.target is None or NODES[probe.target] != node:
                    at_once.post(probe)
                    return
                stand.busy += 1
                stand.most = max(stand.most, stand.busy)
                asyncio.get_running_loop().call_later(0.01, self.end, probe)

            def end(self, probe: Probe) -> None:
                stand.busy -= 1
                at_once.post(probe)

        return Channel()


@pytest.mark.parametrize(
    ("sequences", "hosts", "most"),
    [((1,), HOSTS, 2), ((1,), ("one", "one"), 1), ((1, 2), ("one", "one"), 2), ((), ("one", "one"), 2)],
)
def test_nodes_of_one_machine_are_measured_as_they_will_work(
    sequences: tuple[int, ...], hosts: tuple[str, str], most: int
) -> None:
    """One after the other where one request goes from stage to stage: they share a memory, and none waits for it."""
    stand, settings = Slow(), msgspec.structs.replace(SETTINGS, sequences=sequences)
    stand.examiner = Examiner(stand, settings)  # type: ignore[arg-type]
    survey = asyncio.run(stand.examiner.survey(NODES, hosts, SurveyRequest(SPEC, "serve", settings)))
    assert stand.most == most and [node.node for node in survey.nodes] == ["a", "b"]
    assert in_time(settings, hosts).measure_seconds == pytest.approx(0.1 / (2 if most == 1 else 1))


def test_a_survey_that_was_kept_is_of_these_nodes_or_none() -> None:
    def facts(name: str, host: str, cores: int = 2) -> NodeFacts:
        return NodeFacts(node=name, host_name=host, memory_bytes=1, cores=cores, host="h", port=1)

    known = survey_of("serve", serving_node("a"), serving_node("b"))
    asked = SurveyRequest(SPEC, "serve", SETTINGS, known)
    recalled = asked.recalled([facts("new-1", "a"), facts("new-2", "b")])
    assert recalled is not None and [node.node for node in recalled.nodes] == ["new-1", "new-2"]
    assert asked.recalled([facts("new-1", "b"), facts("new-2", "a")]) is None
    assert asked.recalled([facts("new-1", "a"), facts("new-2", "b", cores=8)]) is None
    on_gpu = msgspec.structs.replace(facts("new-2", "b"), devices=(DeviceFacts("cuda:0 Some GPU", 1),))
    assert asked.recalled([facts("new-1", "a"), on_gpu]) is None, "it was measured on its processors"
    assert asked.known is not None
    here = tuple(node.node for node in asked.known.nodes)
    assert asked.ordered(here[::-1]) == here, "nodes that were measured keep their order, and so their ranks"
    assert asked.ordered(("new-2", "new-1")) == ("new-2", "new-1")
    assert asked.recalled([facts("new-1", "a")]) is None
    assert SurveyRequest(spec_of(9), "serve", SETTINGS, known).recalled([facts("a", "a"), facts("b", "b")]) is None
    assert ASKED.recalled([facts("a", "a"), facts("b", "b")]) is None, "nothing was kept"


def test_one_process_measures_again_what_its_survey_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, here = serving_node("here"), serving_node("here", socket.gethostname())
    monkeypatch.setattr(survey_cluster, "examined", lambda *asked: measured)
    monkeypatch.setattr(survey_cluster, "cores", lambda: here.cores)
    known = survey_of("serve", here)
    assert survey_here(SurveyRequest(SPEC, "serve", SETTINGS, known)) is known
    for lacking in ({"intra_host": "nccl"}, {"rollouts": (8,)}):
        asked = SurveyRequest(SPEC, "serve", msgspec.structs.replace(SETTINGS, **lacking), known)
        survey = survey_here(asked)
        assert survey.nodes == (measured,) and survey.intra_host == asked.settings.intra_host
