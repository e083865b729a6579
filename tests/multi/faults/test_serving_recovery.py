"""Serving outlives its nodes: processes that are killed and stopped, and streams that go on with the same tokens."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.commands.forked_command import ForkedCommand
from tests.support.models.families import save_model
from tllm.core.errors import ClusterError
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator import coordinator as coordinator_module
from tllm.node.coordinator.cluster_options import ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.node.sources.node_source import JoinLine
from tllm.node.weights.model_folder import ModelFolder
from tllm.recipes.bench.processes import free_row
from tllm.spec.request import Request, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch

SIZES = EngineConfig(cache_tokens=2048, max_model_len=256)
PROMPT = (1, 2, 3, 4)
GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=200, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True, frequency_penalty=0.3, logprobs=2
)
STREAMS = {"greedy": GREEDY, "seeded": SEEDED}

Truth = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    with Engine.load(model, "pp=1", SIZES) as engine:
        return {name: engine.generate([PROMPT], params)[0] for name, params in STREAMS.items()}


def play(scene: Callable[[], Awaitable[None]], seconds: float = 140.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await scene()

    asyncio.run(limited())


@contextlib.contextmanager
def joining(
    address: str, token: str, node: str, rejoin: float = 0.0, kept: Path | None = None, pages: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A node that joins as `tllm join` does, killed at the end if it still lives. `kept`: its folder for weights,
    `pages`: for pages of the cache."""
    host, _, port = address.rpartition(":")
    settings = dict(host=host, port=int(port), token=token, node=node, threads=1, rejoin=rejoin)
    if kept is not None:
        settings.update(weights_cache=str(kept), weights_cache_bytes=2**30)
    if pages is not None:
        settings.update(cache_dir=str(pages), cache_dir_size=2**30)
    with ForkedCommand(
        [sys.executable, "-m", "tllm.node.worker"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


class Streams:
    """A greedy and a seeded stream, read as they come."""

    def __init__(self, cluster: Serving) -> None:
        self.cluster = cluster
        self.ids: dict[str, list[int]] = {name: [] for name in STREAMS}
        self.tasks = [asyncio.create_task(self._read(name, params)) for name, params in STREAMS.items()]

    async def _read(self, name: str, params: SamplingParams) -> None:
        request = Request(id=f"{name}-{id(self)}", prompt_ids=PROMPT, params=params)
        async for output in self.cluster.submit(request):
            self.ids[name] += output.token_ids
            is_wanted = params.logprobs is not None and not output.computed_tokens  # which come before all tokens
            assert bool(output.logprobs) == is_wanted

    async def reach(self, tokens: int) -> None:
        while min(map(len, self.ids.values())) < tokens:
            await asyncio.sleep(0.005)

    async def end(self) -> dict[str, list[int]]:
        await asyncio.gather(*self.tasks)
        return self.ids


def kill(cluster: Serving | Coordinator, rank: int, number: signal.Signals = signal.SIGKILL) -> str:
    """Send a signal to the node of a rank; its name."""
    member = cluster.state.ranks[rank]
    os.kill(member.facts.pid, number)
    return member.node


async def begun(cluster: Serving, epoch: int) -> None:
    while cluster.state.epoch < epoch or not cluster.is_open:
        await asyncio.sleep(0.01)


async def restored(cluster: Serving) -> None:
    while not cluster.is_open or cluster.state.plan != cluster.coordinator.work.plan:
        await asyncio.sleep(0.05)


def test_a_cluster_outlives_one_loss_after_another(model: Path, truth: Truth, caplog: pytest.LogCaptureFixture) -> None:
    """Lost while idle, in the first batch, and in mid-stream: killed, or stopped and only silent."""

    async def scene() -> None:
        async with open_cluster(model, "pp=3", SIZES, ClusterOptions()) as cluster:
            kill(cluster, 1)
            while cluster.is_open:
                await asyncio.sleep(0.01)
            assert not cluster.health().ready
            assert await Streams(cluster).end() == truth, "what comes meanwhile waits"
            streams, epoch = Streams(cluster), cluster.state.epoch
            await asyncio.sleep(0)
            assert kill(cluster, 0) == "local-0"
            await streams.reach(20)
            await begun(cluster, epoch + 1)
            stopped = kill(cluster, len(cluster.state.ranks) - 1, signal.SIGSTOP)
            start, epoch = time.monotonic(), cluster.state.epoch
            while (health := cluster.health()).node != stopped:
                await asyncio.sleep(0.05)
            assert health.running == 2 and cluster.state.epoch == epoch, "it is named before it is lost"
            await begun(cluster, epoch + 1)
            assert time.monotonic() - start < 29, "who waited for the stopped one on a link, for 30 s, was woken"
            assert await streams.end() == truth
            await restored(cluster)  # by workers that were started again, and put to use as nothing runs
            assert {member.node for member in cluster.state.ranks} == {"local-0", "local-1", "local-2"}
            assert await Streams(cluster).end() == truth
            assert (cluster.health().node, cluster.status()["fault"]) == ("", "")
            while cluster.stats()["kv_usage"]:  # a heartbeat tells that all pages were let go
                await asyncio.sleep(0.05)

    play(scene)
    assert "its machine answers and its process does not" in caplog.text
    assert wait_until_gone(descendants()) == []


def test_a_node_lost_while_others_load_for_one_lost_before(
    model: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = [2, 1]
    load = Coordinator._load

    async def kill_then_load(coordinator: Coordinator, on_progress: OnProgress | None) -> None:
        if coordinator.state.epoch == 2:
            kill(coordinator, victims.pop())
        await load(coordinator, on_progress)

    monkeypatch.setattr(Coordinator, "_load", kill_then_load)

    async def scene() -> None:
        async with open_cluster(model, "pp=2,tp=1+2", SIZES) as cluster:
            streams = Streams(cluster)
            await streams.reach(10)
            kill(cluster, victims.pop(0))
            assert await streams.end() == truth
            assert cluster.recovery.lost_ranks == 2 and not victims
            assert cluster.state.epoch >= 3

    play(scene)
    assert wait_until_gone(descendants()) == []


def test_with_nobody_left_requests_end_once_and_the_next_node_brings_service_back(model: Path, truth: Truth) -> None:
    async def scene() -> None:
        with contextlib.ExitStack() as stack:
            invited: list[tuple[str, str]] = []

            def join(name: str, address: str, token: str) -> None:
                stack.enter_context(joining(address, token, name))

            def invite(count: int, address: str, token: str) -> None:
                if not invited:
                    for name in ("east", "west"):
                        join(name, address, token)
                invited.append((address, token))

            async with open_cluster(
                model, "pp=2", SIZES, ClusterOptions(local=0, source=JoinLine(invite), join_seconds=120)
            ) as cluster:
                streams = Streams(cluster)
                await streams.reach(10)
                lost = [kill(cluster, rank) for rank in (0, 1)]
                for task in streams.tasks:
                    with pytest.raises(ClusterError, match=r"nobody can take over: 0 of 2 nodes are here") as caught:
                        await task
                    assert any(node in caught.value.message for node in lost)
                for name in STREAMS:
                    assert streams.ids[name] == truth[name][: len(streams.ids[name])]
                with pytest.raises(ClusterError, match="nobody can take over"):
                    await Streams(cluster).end()
                health = cluster.health()
                assert (health.alive, health.ready, health.running) == (True, False, 0)
                assert health.node in lost
                join("north", *invited[-1])
                await begun(cluster, 2)
                assert await Streams(cluster).end() == truth

    play(scene)


class Elsewhere(ModelFolder):
    """The coordinator's model, in a folder that no node has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = Path("/nowhere")


def test_a_successor_takes_its_weights_from_a_neighbour_when_the_coordinator_has_lost_its_files(
    model: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "ModelFolder", Elsewhere)
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    weights = folder / "model.safetensors"

    def taken(cluster: Serving) -> dict[tuple[str, str], int]:
        return {(way["node"], way["source"]): way["bytes"] for way in cluster.status()["weights"]["brought"]}

    async def scene() -> None:
        with contextlib.ExitStack() as stack:
            invited: list[tuple[str, str]] = []

            def join(name: str) -> None:
                stack.enter_context(joining(*invited[-1], name, kept=tmp_path / name))

            def invite(count: int, address: str, token: str) -> None:
                invited.append((address, token))
                for name in ("east", "west") if len(invited) == 1 else ():
                    join(name)

            async with open_cluster(
                folder, "tp=2", SIZES, ClusterOptions(local=0, source=JoinLine(invite), join_seconds=120)
            ) as cluster:
                size, first = weights.stat().st_size, taken(cluster)
                once = sum(count for (_, source), count in first.items() if source == "coordinator")
                assert size / 2 < once <= size, "each chunk left here once at most"
                for (node, source), count in first.items():
                    assert cluster.stats()[f"weights_bytes/{node}/{source}"] == count
                assert sum(first.values()) > 1.5 * size, "both took nearly all, by columns"
                cluster.coordinator.invite(1)
                join("north")
                while cluster.state.member("north") is None:
                    await asyncio.sleep(0.02)
                weights.write_bytes(b"")
                streams = Streams(cluster)
                await streams.reach(10)
                west = next(rank for rank, member in enumerate(cluster.state.ranks) if member.node == "west")
                kill(cluster, west)
                assert await streams.end() == truth
                await restored(cluster)
                ranks = {member.node: member.loaded for member in cluster.state.ranks}
                assert ranks.keys() == {"east", "north"}
                now = taken(cluster)
                assert now["north", "east"] > size / 2 and ("north", "coordinator") not in now
                assert {way: now[way] for way in first} == first

    play(scene)


SERVE = """
import asyncio, sys
from pathlib import Path
from tllm.cli.arguments import survey_settings
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.api.engine_options import engine_config
from tllm.api.engine_options import EngineOptions, read_spec
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster, serving_workload
from tllm.planner.cost.serving_load import ServingFacts
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.node.sources.node_source import JoinLine

class Two(ServingChooser):
    "Measures three nodes, and leaves one out."

    def __call__(self, survey):
        self.keep(survey)
        return serving_workload(self.options.folder, Plan.parse("pp=2", 4), engine_config(self.options)), (0, 1)

async def main():
    folder, authority, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    survey_settings.NODE_SECONDS, survey_settings.WAY_SECONDS = 0.3, 0.1
    plan = Plan.parse("pp=3", 4)
    options = EngineOptions(folder, read_spec(folder), plan, "float32", 1, 16, None, 256, 8)
    choice = Two(options, ServingFacts("float32", 8, 12, 1), authority, 3).choice()
    join = JoinLine(lambda count, address, token: print(address, token, flush=True))
    where = ClusterOptions(local=0, address=("127.0.0.1", port), authority=authority, source=join, join_seconds=120)
    async with open_cluster(folder, plan, engine_config(options), where, choice=choice) as cluster:
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        request = Request(id="r", prompt_ids=(1, 2, 3, 4), params=params)
        print([token async for output in cluster.submit(request) for token in output.token_ids], flush=True)
        print([(m.node, m.facts.pid, m.loaded.bytes_read) for m in cluster.state.ranks], flush=True)
        print(sorted(m.node for m in cluster.state.living), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_nodes_keep_their_weights_for_a_coordinator_that_is_started_again(
    model: Path, truth: Truth, tmp_path: Path
) -> None:
    port = free_row(1)
    words = [sys.executable, "-c", SERVE, str(model), str(tmp_path / "authority"), str(port)]
    with contextlib.ExitStack() as stack:
        found, codes = [], []
        for number in range(2):
            process = stack.enter_context(ForkedCommand(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
            assert process.stdout is not None
            start = time.monotonic()
            address, token = process.stdout.readline().decode().split()
            if number == 0:
                names = ("east", "north", "west")
                nodes = [stack.enter_context(joining(address, token, name, rejoin=120)) for name in names]
            assert json.loads(process.stdout.readline()) == truth["greedy"]
            if number == 1:
                assert time.monotonic() - start < 90, "they look for it all the time, and would for 120 s"
            found.append(ast.literal_eval(process.stdout.readline().decode()))
            assert ast.literal_eval(process.stdout.readline().decode()) == list(names), "the one left out as well"
            process.kill() if number == 0 else process.send_signal(signal.SIGINT)
            codes.append(process.wait(60))
        (first, second), ends = found, [node.wait(60) for node in nodes]
    assert [one[:2] for one in first] == [one[:2] for one in second], "the same processes with the same ranks"
    assert all(read > 0 for *_, read in first) and all(read == 0 for *_, read in second)
    assert ends == [0] * 3, "the second one was ended by its operator, and they left in order"
