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
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.settings import SurveySettings
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.coordinator import Coordinator, Workload
from tllm.node.coordinator.forming import forming
from tllm.node.coordinator.survey import SurveyRequest
from tllm.node.serve.open_cluster import serving_workload as serving_work_of
from tllm.node.serve.serving import Serving
from tllm.node.train.open_training import work_of as training_work_of
from tllm.node.train.training_run import TrainingRun
from tllm.planner.measured.survey import Goal, Survey
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.training.job.job_file import read_job
from tllm.training.job.run_start import begin

JOIN_SECONDS, LINK_SECONDS = 120.0, 60.0
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
    drafted ahead in each step."""

    plan: str
    places: list[int]
    prompt: int
    reply: int
    asked: int
    drafted: int = 0


class Numbers(msgspec.Struct, tag=True):
    """Answer: the engine's counters over the replies of the last `Serve`."""


class StandingCluster(Coordinator):
    """A coordinator that has formed as soon as all nodes have joined, before there is a plan."""

    nodes: tuple[str, ...]

    async def form(self, seconds: float | None = None, tell: OnProgress | None = None) -> None:
        self.nodes = await self.wait_for_nodes(seconds)

    async def measure(self, goal: Goal, settings: SurveySettings) -> Survey:
        spec = spec_from_config(json.loads(self.work.config))
        return await self.surveyed(self.nodes, SurveyRequest(spec, goal, settings), None)

    async def start(self, work: Workload, places: list[int]) -> None:
        """Start this work, rank by rank on the nodes with these numbers."""
        self.take(work)
        await self.bring_up(work.plan, [self.nodes[place] for place in places], None)


class TrainingCluster(StandingCluster, TrainingRun):
    """Trains under one plan after another."""

    async def train(self, path: str, order: Train) -> bool:
        self._ended = None
        await self.start(training_work(path, order.sets, order.plan), order.places)
        async for _ in self.news():
            pass
        return True


class ServingCluster(StandingCluster, Serving):
    """Serves under one plan after another."""

    before: dict[str, float]

    async def serve(self, path: str, order: Serve) -> list[float]:
        await self.start(serving_work(path, order.plan, order.prompt + order.reply, order.drafted), order.places)
        self.is_open = True
        self.go_on()
        await self.reply(0, order.prompt, order.reply // 4)
        self.before = await self.counted() if order.drafted else {}
        return [await self.reply(turn, order.prompt, order.reply) for turn in range(1, order.asked + 1)]

    async def numbers(self) -> dict[str, float]:
        return {name: count - self.before.get(name, 0.0) for name, count in (await self.counted()).items()}

    async def counted(self) -> dict[str, float]:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        return dict(self.stats())

    async def reply(self, turn: int, prompt: int, tokens: int) -> float:
        """The seconds of one reply, to a prompt that shares no beginning with another."""
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        ids, times = tuple(100 * turn + place for place in range(prompt)), list[float]()
        async for output in self.submit(Request(id=str(turn), prompt_ids=ids, params=params)):
            times += [time.perf_counter()] * len(output.token_ids)
        return times[-1] - times[0]


def training_work(path: str, sets: list[str], plan: str) -> Workload:
    resolved = read_job(Path(path), sets, plan)
    begun = begin(resolved.job)
    config = json.dumps(read_config(begun.folder))
    return training_work_of(resolved, Plan.parse(plan, begun.spec.num_layers), config, begun.spec, LINK_SECONDS)


def serving_work(path: str, plan: str, longest: int, drafted: int = 0) -> Workload:
    config = EngineConfig(max_model_len=longest, num_speculative_tokens=drafted)
    return serving_work_of(Path(path), plan, config, 1, LINK_SECONDS)


async def run(order: Form) -> None:
    """Form the cluster, then carry out orders until stdin ends."""
    everybody = f"pp={order.nodes}"
    if order.goal == "train":
        work = training_work(order.path, [], everybody)
    else:
        work = serving_work(order.path, everybody, 64)
    kind = TrainingCluster if order.goal == "train" else ServingCluster
    coordinator = kind(work, Authority.create(), (order.host, 0), ["local-0"])
    here = forming(coordinator, ["local-0"], order.host, 1, lambda *how: answer(how), None, JOIN_SECONDS)
    async with here:
        answer(coordinator.nodes)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            match msgspec.json.decode(line, type=Measure | Train | Serve | Numbers):
                case Measure(settings=settings):
                    answer(await coordinator.measure(order.goal, settings))
                case Train() as asked if isinstance(coordinator, TrainingCluster):
                    answer(await coordinator.train(order.path, asked))
                case Serve() as asked if isinstance(coordinator, ServingCluster):
                    answer(await coordinator.serve(order.path, asked))
                case Numbers() if isinstance(coordinator, ServingCluster):
                    answer(await coordinator.numbers())


def answer(found: object) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Form)))
