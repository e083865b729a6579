"""`SimulatedRun`: the coordinator of an elastic training run, with nodes that are simulated, in virtual time.

All that decides is the code that users run: `ElasticRun`, `Recovery`, `Coordinator`, `Membership` and the cluster's
state. The nodes, their machines and the network are `simulated_nodes`; TLS and joining by token are left out.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.simulated_nodes import Machines, SimulatedCluster, SimulatedNode
from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.coordinator.membership import ProbeResult, Surroundings
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.training_work import TrainingWork
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob

MODEL: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=5632,
    vocab_size=32000,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    hidden_act="silu",
    torch_dtype="bfloat16",
)
"""A model of the shape of Llama with 1.2 billion parameters, of which nothing is loaded."""

LOOK_SECONDS = 0.1

SEED_OF_DEATHS = 10
"""Of its own, so that nodes die at the same times whatever else was drawn."""

REPLICA = "pp=4,tp=4"
REPLICA_RANKS = 16


@dataclass(frozen=True)
class Cost:
    """What something took: `seconds` of virtual time, of which nothing is the coordinator's own work; `processor`
    seconds of this process, simulated nodes included; messages and bytes that are no heartbeats, and the heartbeats.
    """

    seconds: float
    processor: float
    messages: int
    nbytes: int
    beats: int


@dataclass(frozen=True)
class Churn:
    """A time with deaths.

    computing: the part of it in which the ranks computed. recoveries: of each death, how many seconds after it the
    ranks computed again without that node. returned: nodes that came back by their names, and were taken in. refused:
    how often one was turned away before, as it was not missed yet. epochs: that began.
    """

    cost: Cost
    deaths: int
    computing: float
    recoveries: list[float]
    returned: int
    refused: int
    epochs: int


class _Death(NamedTuple):
    at: float
    epoch: int


class SimulatedRun:
    """A run over so many simulated nodes, one for each rank. It belongs to the loop that runs when it is made."""

    def __init__(self, ranks: int, folder: Path, machines: Machines | None = None, seed: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self.ranks = ranks
        self.run = ElasticRun(_work(ranks, folder).workload(), Authority.create(), LOOPBACK)
        self.coordinator = self.run.coordinator
        members = self.coordinator.members
        members.surroundings = Surroundings(loop.time, _cut_off)
        parts = REPLICA_RANKS if ranks >= REPLICA_RANKS else 1
        self.cluster = SimulatedCluster(members, machines or Machines(), seed, parts)
        self.events: list[str] = []
        self._tasks = [loop.create_task(self.coordinator.run()), loop.create_task(self._follow())]
        self._loop = loop

    async def form(self, within: float) -> Cost:
        """Let all nodes join within so many seconds, and wait until the run computes."""
        mark = self._mark()
        self.cluster.arrive(self.ranks, within)
        await self.run.form()
        return self._since(mark)

    async def stay(self, seconds: float) -> Cost:
        """Let the run go on for so long."""
        mark = self._mark()
        await asyncio.sleep(seconds)
        return self._since(mark)

    async def lose(self, is_silent: bool, place: int = -1) -> Cost:
        """Let one node die that has a rank, any unless its `place` is given, and wait until the others compute."""
        mark, epoch = self._mark(), self.coordinator.state.epoch
        nodes = list(self.cluster.nodes.values())
        node = nodes[place] if place >= 0 else self.cluster.random.choice(nodes)
        self.cluster.kill(node, is_silent)
        await self._computes_after(epoch)
        return self._since(mark)

    async def restore(self, count: int) -> Cost:
        """Let so many nodes join, as replacements of those that died, and wait until the whole plan computes again."""
        mark = self._mark()
        self.cluster.arrive(count, 1.0)
        plan = self.coordinator.work.plan
        while not (self.run.is_open and self.coordinator.state.plan == plan):
            self._check()
            await asyncio.sleep(LOOK_SECONDS)
        return self._since(mark)

    async def churn(self, seconds: float, every: float, back_after: float) -> Churn:
        """For so long let a node die `every` so many seconds on an average. Every other one falls silent. All come back
        by their names, the others after `back_after` seconds and silent ones after a second, while nobody has missed
        them; then wait until all that died are done without."""
        draw, mark, until = random.Random(SEED_OF_DEATHS), self._mark(), self._loop.time() + seconds
        state, refused = self.coordinator.state, self.cluster.refused
        next_death, open_deaths = self._loop.time() + draw.expovariate(1 / every), list[_Death]()
        dead, recoveries, computed, looks = list[str](), list[float](), 0, 0
        while self._loop.time() < until or open_deaths:
            await asyncio.sleep(LOOK_SECONDS)
            self._check()
            looks, computed = looks + 1, computed + self.run.is_open
            if self.run.is_open:
                epoch = self.coordinator.state.epoch
                recoveries += [self._loop.time() - death.at for death in open_deaths if epoch > death.epoch]
                open_deaths = [death for death in open_deaths if epoch <= death.epoch]
            if next_death <= self._loop.time() < until:
                node, is_silent = self._with_rank(), len(dead) % 2 == 1
                self.cluster.kill(node, is_silent)
                self._loop.call_later(1.0 if is_silent else back_after, self.cluster.come_back, node)
                open_deaths.append(_Death(self._loop.time(), self.coordinator.state.epoch))
                dead.append(node.name)
                next_death += draw.expovariate(1 / every)
        back = sum(name in self.cluster.nodes for name in dead)
        epochs = self.coordinator.state.epoch - state.epoch
        turned_away = self.cluster.refused - refused
        return Churn(self._since(mark), len(dead), computed / looks, recoveries, back, turned_away, epochs)

    def _with_rank(self) -> SimulatedNode:
        """Any node that has a rank of the plan, and is alive."""
        seated = [member.node for member in self.coordinator.state.seated if member.node in self.cluster.nodes]
        return self.cluster.nodes[self.cluster.random.choice(seated)]

    def _check(self) -> None:
        """Raise what the coordinator, or what follows the run, has failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        """End the coordinator and what follows it. A failure of either is raised here."""
        self._check()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _computes_after(self, epoch: int) -> None:
        while not (self.run.is_open and self.coordinator.state.epoch > epoch):
            self._check()
            await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self) -> None:
        async for event in self.run.events():
            self.events.append(type(event).__name__)

    def _mark(self) -> tuple[float, float, int, int, int]:
        traffic = self.cluster.traffic
        messages, nbytes = traffic.without_beats()
        return self._loop.time(), time.process_time(), messages, nbytes, traffic.messages - messages

    def _since(self, mark: tuple[float, float, int, int, int]) -> Cost:
        now = self._mark()
        return Cost(now[0] - mark[0], now[1] - mark[1], now[2] - mark[2], now[3] - mark[3], now[4] - mark[4])


def _work(ranks: int, folder: Path) -> TrainingWork:
    """A run on whole replicas of 16 ranks, or with fewer ranks on replicas of one rank."""
    dp = ranks // REPLICA_RANKS
    plan = f"{REPLICA},dp={dp}" if dp > 1 else REPLICA if dp else f"dp={ranks}"
    job = Job(
        model_name_or_path=str(folder),
        train_files=(str(folder / "rows.jsonl"),),
        output_dir=str(folder / "run"),
        max_steps=10**6,
        seq_len=4096,
        global_batch_size=8 * max(dp, 1),
        dtype="bfloat16",
    )
    return TrainingWork(ResolvedJob(job, {}), Plan.parse(plan, MODEL["num_hidden_layers"]), json.dumps(MODEL))


async def _cut_off(address: Address) -> ProbeResult:
    """Nothing answers in the place of a machine without power, as `why_silent` finds out within a second."""
    await asyncio.sleep(1.0)
    return ProbeResult(f"nothing answers at {address[0]}", False)
