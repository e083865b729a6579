"""Ranks on several machines, as their addresses say, measure their links when they begin, and say how they then sum."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.families import save_model
from tests.support.training.runs import job_for, records, train
from tests.support.training.stand_in_trainer import start_node
from tllm.cli.commands.status import network_lines
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.coordinator.status_report import report
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.sources.node_source import JoinLine
from tllm.node.train.open_training import TrainingWork, open_training
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.training.job.job_file import ResolvedJob
from tllm.training.report.events import RunBegan

SIZES = EngineConfig(cache_tokens=1024, max_model_len=256)
SHORT = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
HOSTS = ("127.0.0.1", "127.0.0.2")  # all of 127/8 is this machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


class Machines:
    """A node at each of the hosts, that does what nodes do."""

    def __init__(self) -> None:
        self.processes: list[ForkServerProcess] = []

    def invite(self, count: int, address: str, token: str) -> None:
        nodes = enumerate(HOSTS)
        self.processes = [start_node(address, token, f"node-{i}", None, listen=host) for i, host in nodes]

    def play(self, scene: Coroutine[Any, Any, None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(200):
                await scene

        try:
            asyncio.run(limited())
        finally:
            for process in self.processes:
                process.join(30)
                process.kill()
                process.join()


def test_machines_that_serve_measure_first_and_say_how_they_sum(model: Path) -> None:
    machines = Machines()
    with Engine.load(model, "pp=1", SIZES) as engine:
        truth = engine.generate([(1, 2, 3, 4)], SHORT)[0]

    async def scene() -> None:
        async with open_cluster(
            model, "tp=2", SIZES, ClusterOptions(local=0, source=JoinLine(machines.invite), join_seconds=90)
        ) as cluster:
            found = report(cluster.state)
            (line,) = network_lines(found)
            assert line.startswith("network: tp: 2 ranks on 2 machines, ")
            assert " MB/s; sums: " in line and "one_shot" in line
            request = Request(id="r", prompt_ids=(1, 2, 3, 4), params=SHORT)
            assert [token async for output in cluster.submit(request) for token in output.token_ids] == truth

    machines.play(scene())


def test_machines_that_train_measure_first_and_have_the_same_losses(model: Path, tmp_path: Path) -> None:
    machines = Machines()
    job = job_for(model, tmp_path / "threads", max_steps=2, dtype="float64")
    want = [record.loss for record in records(train(job, "dp=2"))]
    here = replace(job, output_dir=str(tmp_path / "machines"))
    Path(here.output_dir).mkdir()

    async def scene() -> None:
        config = read_config(model)
        plan = Plan.parse("dp=2", spec_from_config(config).num_layers)
        work = TrainingWork(ResolvedJob(here, {}), plan, json.dumps(config))
        options = ClusterOptions(local=0, source=JoinLine(machines.invite), join_seconds=90.0)
        async with open_training(work, options) as run:
            news = [one async for one in run.events()]
            began = news[0]
            assert isinstance(began, RunBegan) and began.network.startswith("dp: 2 ranks on 2 machines, ")
            assert [record.loss for record in records(news)] == pytest.approx(want, rel=1e-12)
            assert all(member.loaded and member.loaded.network for member in run.state.ranks)

    machines.play(scene())
