"""A cluster on which one plan after another is run: its nodes stay, so a plan begins within a second or two.

Runs on the first machine. Each line of stdin is an order in JSON: first to form the cluster, then to measure its
machines, to train by a job, or to serve some prompts. Each line of stdout is an answer; the first one is the address
and the token with which other nodes join. Nodes are numbered from 0 in the order in which they joined.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.settings import SurveySettings
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.forming import forming
from tllm.node.coordinator.survey import SurveyRequest
from tllm.node.coordinator.workload import Workload
from tllm.node.serve.open_cluster import serving_workload
from tllm.node.serve.serving import Serving
from tllm.node.sources.node_source import JoinLine
from tllm.node.train.training_run import TrainingRun
from tllm.node.train.training_work import TrainingWork
from tllm.planner.measured.survey import Goal, Survey
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.spec.speculative_config import read_speculative_config
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job_file import read_job

JOIN_SECONDS = 120.0
LINKS = ClusterOptions(link_seconds=60.0)
"""How long a rank waits for a message of another one, whatever it is to do."""

HEARTBEAT_SECONDS = 3.0
"""After this time a heartbeat has brought the newest counters of every node."""


class Form(msgspec.Struct, tag=True):
    """Wait for `nodes` nodes at `host`; `path` is a model's folder or a job. Answer: address and token to join with."""

    goal: Goal
    path: str
    nodes: int
    host: str


class Measure(msgspec.Struct, tag=True):
    """Answer: a `Survey`."""

    settings: SurveySettings


class Train(msgspec.Struct, tag=True):
    """Answer: true, when the job's run has ended."""

    sets: list[str]
    plan: str
    places: list[int]


class Serve(msgspec.Struct, tag=True):
    """Answer: for each of `asked` replies the seconds from its first token to its last. Up to `drafted` tokens are
    drafted ahead in each step; `draft` is a speculative config in JSON, if a model drafts. `at_once` replies are
    computed together; above `temperature` 0 they are sampled, with one seed for each."""

    plan: str
    places: list[int]
    prompt: int
    reply: int
    asked: int
    drafted: int = 0
    draft: str = ""
    at_once: int = 1
    temperature: float = 0.0


class Numbers(msgspec.Struct, tag=True):
    """Answer: the engine's counters over the replies of the last `Serve`."""


class StandingNodes:
    """The nodes of a cluster, numbered in the order in which they joined: each plan in turn takes ranks among them."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.names: tuple[str, ...] = ()

    async def wait(self, seconds: float | None) -> None:
        """Wait for all of them, `seconds` at most."""
        self.names = await self._coordinator.wait_for_nodes(seconds)

    async def measure(self, goal: Goal, settings: SurveySettings) -> Survey:
        spec = spec_from_config(json.loads(self._coordinator.work.config))
        return await self._coordinator.selection.measure(self.names, SurveyRequest(spec, goal, settings), None)

    async def start(self, work: Workload, places: list[int]) -> None:
        """Start this work, rank by rank on the nodes with these numbers."""
        self._coordinator.work = self._coordinator.job.adopt(work)
        await self._coordinator.bring_up(work.plan, [self.names[place] for place in places], None)


class TrainingCluster(TrainingRun):
    """Trains under one plan after another. It has formed as soon as all nodes have joined, before there is a plan."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str]) -> None:
        super().__init__(work, authority, address, first)
        self.nodes = StandingNodes(self.coordinator)

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        await self.nodes.wait(seconds)

    async def train(self, path: str, order: Train) -> bool:
        self._ended = None
        await self.nodes.start(training_work(path, order.sets, order.plan), order.places)
        async for _ in self.events():
            pass
        return True


class ServingCluster(Serving):
    """Serves under one plan after another. It has formed as soon as all nodes have joined, before there is a plan."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str]) -> None:
        super().__init__(work, authority, address, first)
        self.nodes = StandingNodes(self.coordinator)
        self.before: dict[str, float] = {}

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        await self.nodes.wait(seconds)

    async def serve(self, path: str, order: Serve) -> list[float]:
        work = serving_work(path, order.plan, order.prompt + order.reply, order.drafted, order.draft)
        await self.nodes.start(work, order.places)
        self.recovery.is_open = True  # without `Recovery.begin`, which would go over to other plans by itself
        self.resume()
        await self.turn(0, order, order.reply if order.draft else order.reply // 4)
        self.before = await self.counted() if order.drafted else {}
        return [await self.turn(number, order, order.reply) for number in range(1, order.asked + 1)]

    async def turn(self, number: int, order: Serve, tokens: int) -> float:
        """The seconds of replies that are asked for together."""
        names = range(number * order.at_once, (number + 1) * order.at_once)
        return max(await asyncio.gather(*(self.reply(name, order.prompt, tokens, order.temperature) for name in names)))

    async def numbers(self) -> dict[str, float]:
        return {name: count - self.before.get(name, 0.0) for name, count in (await self.counted()).items()}

    async def counted(self) -> dict[str, float]:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        return dict(self.stats())

    async def reply(self, turn: int, prompt: int, tokens: int, temperature: float) -> float:
        """The seconds of one reply, to a prompt that shares no beginning with another."""
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=turn, ignore_eos=True)
        ids, times = tuple(100 * turn + place for place in range(prompt)), list[float]()
        async for output in self.submit(Request(id=str(turn), prompt_ids=ids, params=params)):
            times += [time.perf_counter()] * len(output.token_ids)
        return times[-1] - times[0]


def training_work(path: str, sets: list[str], plan: str) -> Workload:
    resolved = read_job(Path(path), sets, plan)
    begun = open_initial_model(resolved.job)
    config = json.dumps(read_config(begun.folder))
    return TrainingWork(resolved, Plan.parse(plan, begun.spec.num_layers), config).workload(LINKS)


def serving_work(path: str, plan: str, longest: int, drafted: int = 0, draft: str = "") -> Workload:
    drafts = read_speculative_config(draft) if draft else None
    config = EngineConfig(max_model_len=longest, num_speculative_tokens=drafted, speculative_config=drafts)
    return serving_workload(Path(path), plan, config, LINKS, threads=1)


async def run(order: Form) -> None:
    """Form the cluster, then carry out orders until stdin ends."""
    everybody, here = f"pp={order.nodes}", ["local-0"]
    address = (order.host, 0)
    cluster: TrainingCluster | ServingCluster
    if order.goal == "train":
        cluster = TrainingCluster(training_work(order.path, [], everybody), Authority.create(), address, here)
    else:
        cluster = ServingCluster(serving_work(order.path, everybody, 64), Authority.create(), address, here)
    options = ClusterOptions(threads=1, source=JoinLine(lambda count, *how: answer(how)), join_seconds=JOIN_SECONDS)
    async with forming(cluster, here, order.host, options):
        answer(cluster.nodes.names)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            match msgspec.json.decode(line, type=Measure | Train | Serve | Numbers):
                case Measure(settings=settings):
                    answer(await cluster.nodes.measure(order.goal, settings))
                case Train() as asked if isinstance(cluster, TrainingCluster):
                    answer(await cluster.train(order.path, asked))
                case Serve() as asked if isinstance(cluster, ServingCluster):
                    answer(await cluster.serve(order.path, asked))
                case Numbers() if isinstance(cluster, ServingCluster):
                    answer(await cluster.numbers())


def answer(found: object) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Form)))
