"""Whole clusters of worker processes on this machine: what they compute, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.commands.forked_command import ForkedCommand, command_server
from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tllm.cluster.connection import parse_address
from tllm.cluster.join import join
from tllm.cluster.join_token import JoinToken
from tllm.core.errors import (
    AuthError,
    CapacityError,
    ClusterError,
    ConfigError,
    PlanError,
    RequestError,
    TllmError,
    WeightsError,
)
from tllm.core.memory import amount
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator import coordinator as coordinator_module
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.coordinator.forming import LOCAL_SECONDS
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.node.sources.node_source import JoinLine
from tllm.node.weights.model_folder import ModelFolder
from tllm.planner.cost.cache_room import RUNTIME_BYTES
from tllm.spec.request import Output, Request, SamplingParams

ROOT = Path(__file__).resolve().parents[3]
SIZES = EngineConfig(cache_tokens=1024, max_model_len=256)
PROMPT = (1, 2, 3, 4)
HEADER = 8192  # bytes of a weight file that are not weights, at most
LARGEST_UNTOUCHED = 600 * 2**20  # bytes that libraries for GPUs map and never write to, with room
LONG = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def commands_at_hand() -> None:
    """Else the first node that a scene starts waits for the imports of who forks it, and the coordinator, which is in
    the same loop, answers nobody meanwhile."""
    command_server()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def truth(model: Path) -> list[int]:
    with Engine.load(model, "pp=1", SIZES) as engine:
        return engine.generate([PROMPT], SHORT)[0]


def play(scene: Callable[[], Awaitable[None]], seconds: float = 140.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await scene()

    asyncio.run(limited())


async def ids(cluster: Serving, params: SamplingParams = SHORT, name: str = "r") -> list[int]:
    request = Request(id=name, prompt_ids=PROMPT, params=params)
    return [token async for output in cluster.submit(request) for token in output.token_ids]


def pid_of(cluster: Serving, rank: int) -> int:
    return cluster.state.ranks[rank].facts.pid


PLANS = ("pp=2", "pp=2,tp=1+2", "tp=3,shares=1:2:1")


@pytest.mark.parametrize("plan", soak_but(PLANS[2:], PLANS))
def test_a_cluster_computes_what_one_process_does_and_reads_each_byte_once(
    plan: str, model: Path, truth: list[int]
) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def tell(what: str, done: int, total: int) -> None:
        seen[what] = (done, total)

    async def scene() -> None:
        async with open_cluster(model, plan, SIZES, ClusterOptions(on_progress=tell)) as cluster:
            together = await asyncio.gather(*(ids(cluster, name=str(i)) for i in range(4)))
            assert together == [truth] * 4
            status = cluster.status()
            json.dumps(status)
            assert status["ready"]
            assert cluster.health().ready
            nodes = status["nodes"]
            assert [node["rank"] for node in sorted(nodes, key=lambda n: n["node"])] == list(range(len(nodes)))
            weights = (model / "model.safetensors").stat().st_size
            # Norms are held by each rank of a stage, and kv heads by more than one where ranks outnumber them.
            assert weights <= sum(node["bytes_read"] for node in nodes) + HEADER < 1.15 * weights
            for node in nodes:
                assert node["bytes_read"] == node["parameter_bytes"]
                assert node["bytes_fetched"] == 0
            assert all(done == total > 0 for done, total in seen.values())
            assert len(seen) == len(nodes)

    play(scene)
    assert wait_until_gone(descendants()) == []


def test_a_node_without_the_model_gets_its_bytes_from_the_coordinator(
    model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(ModelFolder):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.path = Path("/nowhere")

    monkeypatch.setattr(coordinator_module, "ModelFolder", Elsewhere)

    async def scene() -> None:
        async with open_cluster(model, "pp=2", SIZES) as cluster:
            assert await ids(cluster) == truth
            for node in cluster.status()["nodes"]:
                assert node["bytes_fetched"] >= node["parameter_bytes"]
                assert node["bytes_fetched"] < (model / "model.safetensors").stat().st_size

    play(scene)


@contextlib.contextmanager
def joining(address: str, token: str, node: str) -> object:
    host, _, port = address.rpartition(":")
    settings = json.dumps(dict(host=host, port=int(port), token=token, node=node, threads=1))
    with ForkedCommand(
        [sys.executable, "-m", "tllm.node.worker"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(settings.encode() + b"\n")
        process.stdin.flush()
        yield process


def test_workers_here_keep_together_to_what_is_given(model: Path, truth: list[int]) -> None:
    given = 900 * 2**20

    async def scene() -> None:
        async with open_cluster(model, "pp=2", SIZES, ClusterOptions(memory=given)) as cluster:
            assert await ids(cluster) == truth
            rooms = {member.facts.room for member in cluster.state.ranks}
            assert len(rooms) == 1 and next(iter(rooms))[1] == given
            for rank in range(2):
                limits = Path(f"/proc/{pid_of(cluster, rank)}/limits").read_text().splitlines()
                (limit,) = [int(line.split()[3]) for line in limits if line.startswith("Max data size")]
                assert given <= limit < given + LARGEST_UNTOUCHED

    play(scene)
    assert wait_until_gone(descendants()) == []


def test_a_plan_that_does_not_fit_what_is_given_here_is_refused(model: Path) -> None:
    async def scene() -> None:
        words = rf"the ranks on \S+ need .* and it has {amount(2 * RUNTIME_BYTES)}, "
        with pytest.raises(CapacityError, match=words):
            async with open_cluster(model, "pp=2", SIZES, ClusterOptions(memory=2 * RUNTIME_BYTES)):
                pass

    play(scene)


def test_other_machines_join_by_what_the_coordinator_prints(model: Path, truth: list[int]) -> None:
    """Nodes that fail before they are members have used the token up: who comes with it then has a new line printed."""

    async def use_up(address: str, token: str) -> None:
        where, given = parse_address(address), JoinToken.parse(token)
        for node in ("failed", "failed-too"):
            await join(where, given, node)
        with pytest.raises(AuthError, match="used up") as refused:
            await join(where, given, "east")
        assert "printed last" in refused.value.hint

    async def scene() -> None:
        with contextlib.ExitStack() as stack:
            started: list[subprocess.Popen[bytes]] = []
            first: list[asyncio.Task[None]] = []

            def invite(count: int, address: str, token: str) -> None:
                if not first:
                    first.append(asyncio.create_task(use_up(address, token)))
                    return
                for node in ("east", "west"):
                    started.append(stack.enter_context(joining(address, token, node)))  # type: ignore[arg-type]

            async with open_cluster(
                model, "pp=3", SIZES, ClusterOptions(local=1, source=JoinLine(invite), join_seconds=120)
            ) as cluster:
                assert {member.node for member in cluster.state.ranks} == {"local-0", "east", "west"}
                assert cluster.state.ranks[0].node == "local-0"
                assert await ids(cluster) == truth
                await first[0]
            for process in started:
                assert await asyncio.to_thread(process.wait, 60) == 0

    play(scene)


def test_too_few_nodes_is_said_and_ends(model: Path) -> None:
    async def scene() -> None:
        with pytest.raises(ClusterError, match=r"0 of 2 nodes joined within 0\.3 s \(none\)"):
            async with open_cluster(model, "pp=2", SIZES, ClusterOptions(local=0, join_seconds=0.3)):
                pass

    play(scene)


COORDINATOR = """
import asyncio, sys
from pathlib import Path
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.serve.open_cluster import open_cluster

async def main():
    async with open_cluster(Path(sys.argv[1]), "pp=2", EngineConfig(cache_tokens=1024, max_model_len=256)) as cluster:
        print(*(member.facts.pid for member in cluster.state.ranks), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_coordinator_however_it_ends(number: signal.Signals, model: Path) -> None:
    with ForkedCommand(
        [sys.executable, "-c", COORDINATOR, str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        process.send_signal(number)
        process.wait(60)
        assert wait_until_gone(workers) == []


def test_requests_that_are_closed_or_cannot_be_served_harm_no_other(model: Path, truth: list[int]) -> None:
    async def scene() -> None:
        async with open_cluster(model, "pp=2", SIZES) as cluster:
            await closing_a_request_cancels_it(cluster, truth)
            await one_that_cannot_be_served_is_refused_alone(cluster, truth)

    play(scene)


async def closing_a_request_cancels_it(cluster: Serving, truth: list[int]) -> None:
    for i in range(3):
        outputs = cluster.submit(Request(id=f"c{i}", prompt_ids=PROMPT, params=LONG))
        await anext(outputs)
        await outputs.aclose()
    assert cluster.health().running == 0
    assert await ids(cluster) == truth
    await asyncio.sleep(1.0)
    while cluster.stats()["running"] or cluster.stats()["kv_usage"]:  # until a heartbeat tells that all is let go
        await asyncio.sleep(0.1)


async def one_that_cannot_be_served_is_refused_alone(cluster: Serving, truth: list[int]) -> None:
    too_long = Request(id="long", prompt_ids=(1,) * 300, params=SHORT)
    with pytest.raises(RequestError, match="300"):
        await collect(cluster.submit(too_long))
    same = [asyncio.create_task(ids(cluster, name="same")) for _ in range(2)]
    done = await asyncio.gather(*same, return_exceptions=True)
    assert sorted(map(str, done)) == sorted([str(truth), str(done[1])])
    assert isinstance(done[1], RequestError)
    assert await ids(cluster) == truth


async def collect(outputs: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in outputs]


def broken_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def strange_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (broken_weights, WeightsError),
        pytest.param(missing_weights, WeightsError, marks=pytest.mark.soak),
        (strange_config, PlanError),
    ],
)
def test_a_spoilt_folder_is_an_error_in_words_and_nothing_is_left(
    spoil: Callable[[Path], None], error: type[TllmError], model: Path, tmp_path: Path
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)

    async def scene() -> None:
        start = time.monotonic()
        with pytest.raises(error):
            async with open_cluster(tmp_path, "pp=2", SIZES):
                pass
        assert time.monotonic() - start < LOCAL_SECONDS / 2, "nobody waits for what cannot come"

    play(scene)
    assert wait_until_gone(descendants()) == []


def test_a_worker_that_dies_before_it_joins_ends_the_wait(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AuthError("not today")

    monkeypatch.setattr("tllm.cluster.control_server.ControlServer._reply", refuse)

    async def scene() -> None:
        with pytest.raises(TllmError, match=r"worker local-\d ended with exit code 5") as caught:
            async with open_cluster(model, "pp=2", SIZES):
                pass
        assert "not today" in caught.value.hint

    play(scene)


def test_a_port_in_use_is_said_before_anything_starts(model: Path) -> None:
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
            async with open_cluster(model, "pp=2", SIZES, ClusterOptions(address=taken.getsockname())):
                pass

    play(scene)
