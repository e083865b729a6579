"""A cluster that stands while one plan after another is run on it: each begins within a second or two.

Each line of stdin is an order: how to stand, then to measure the machines, to train by a job, to serve some prompts.
Each line of stdout is an answer; the first says how others join. Places are those of the nodes, as they came.
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
from tllm.engine.limits import EngineConfig
from tllm.node.coordinator.coordinator import Coordinator, Tell, Workload
from tllm.node.coordinator.forming import forming
from tllm.node.coordinator.survey import SurveyRequest
from tllm.node.serve.open_cluster import work_of as serving_work_of
from tllm.node.serve.serving import Serving
from tllm.node.train.open_training import work_of as training_work_of
from tllm.node.train.training_run import TrainingRun
from tllm.planner.measured.survey import Goal, Survey
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.train.job.job_file import read_job
from tllm.train.job.run_start import begin

JOIN_SECONDS, LINK_SECONDS = 120.0, 60.0
BEAT_SECONDS = 3.0
"""In which a heartbeat has come."""


class Stand(msgspec.Struct, tag=True):
    """Let so many nodes come to a host; `path` is a model's folder, or a job. Answer: what else they must know."""

    goal: Goal
    path: str
    nodes: int
    host: str


class Measure(msgspec.Struct, tag=True):
    """Answer: a `Survey`."""

    settings: SurveySettings


class Train(msgspec.Struct, tag=True):
    """Answer: true, when the run that the job tells of has ended."""

    sets: list[str]
    plan: str
    places: list[int]


class Serve(msgspec.Struct, tag=True):
    """Answer: of each of so many replies the seconds from its first token to its last. A turn may check so many tokens
    that were `drafted`."""

    plan: str
    places: list[int]
    prompt: int
    reply: int
    asked: int
    drafted: int = 0


class Numbers(msgspec.Struct, tag=True):
    """Answer: what the driver has counted in these replies."""


class Standing(Coordinator):
    """Has formed when its nodes are here."""

    nodes: tuple[str, ...]

    async def form(self, seconds: float | None = None, tell: Tell | None = None) -> None:
        self.nodes = await self.wait_for_nodes(seconds)

    async def measure(self, goal: Goal, settings: SurveySettings) -> Survey:
        spec = spec_from_config(json.loads(self.work.config))
        return await self.surveyed(self.nodes, SurveyRequest(spec, goal, settings), None)

    async def under(self, work: Workload, places: list[int]) -> None:
        """Begin this work, its ranks on the nodes of these places."""
        self.take(work)
        await self.bring_up(work.plan, [self.nodes[place] for place in places], None)


class Trains(Standing, TrainingRun):
    """One run after another."""

    async def train(self, path: str, order: Train) -> bool:
        self._ended = None
        await self.under(training_work(path, order.sets, order.plan), order.places)
        async for _ in self.news():
            pass
        return True


class Serves(Standing, Serving):
    """Replies under one plan after another."""

    before: dict[str, float]

    async def serve(self, path: str, order: Serve) -> list[float]:
        await self.under(serving_work(path, order.plan, order.prompt + order.reply, order.drafted), order.places)
        self.is_open = True
        self.go_on()
        await self.reply(0, order.prompt, order.reply // 4)
        self.before = await self.counted() if order.drafted else {}
        return [await self.reply(turn, order.prompt, order.reply) for turn in range(1, order.asked + 1)]

    async def numbers(self) -> dict[str, float]:
        return {name: count - self.before.get(name, 0.0) for name, count in (await self.counted()).items()}

    async def counted(self) -> dict[str, float]:
        await asyncio.sleep(BEAT_SECONDS)
        return dict(self.stats())

    async def reply(self, turn: int, prompt: int, tokens: int) -> float:
        """To a prompt that no other began like."""
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


async def stand(order: Stand) -> None:
    """Until there is no order any more."""
    everybody = f"pp={order.nodes}"
    if order.goal == "train":
        work = training_work(order.path, [], everybody)
    else:
        work = serving_work(order.path, everybody, 64)
    kind = Trains if order.goal == "train" else Serves
    coordinator = kind(work, Authority.create(), (order.host, 0), ["local-0"])
    here = forming(coordinator, ["local-0"], order.host, 1, lambda *how: answer(how), None, JOIN_SECONDS)
    async with here:
        answer(coordinator.nodes)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            match msgspec.json.decode(line, type=Measure | Train | Serve | Numbers):
                case Measure(settings=settings):
                    answer(await coordinator.measure(order.goal, settings))
                case Train() as asked if isinstance(coordinator, Trains):
                    answer(await coordinator.train(order.path, asked))
                case Serve() as asked if isinstance(coordinator, Serves):
                    answer(await coordinator.serve(order.path, asked))
                case Numbers() if isinstance(coordinator, Serves):
                    answer(await coordinator.numbers())


def answer(found: object) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(stand(msgspec.json.decode(sys.stdin.buffer.readline(), type=Stand)))
