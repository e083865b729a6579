"""Rollout servers of tests: served in a thread of this process, or by several that hold one model together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

from tests.support.training.local_links import local_links
from tests.support.training.post_training.teachers import in_a_thread
from tllm.cluster.tls import data_server
from tllm.node.answering.answering_team import AnsweringTeam, LeadingModel
from tllm.node.roles.rollout_model import RolloutModel
from tllm.spec.plan import Plan
from tllm.training.questions.question_server import Answerer, QuestionServer
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.rollout_servers.rollout_messages import SAMPLING, RolloutAnswer, RolloutQuestion, RolloutRun

RolloutServer = QuestionServer[RolloutRun, RolloutQuestion, RolloutAnswer]
RolloutAnswerer = Answerer[RolloutRun, RolloutQuestion, RolloutAnswer]


@contextmanager
def sampling(folder: Path, secret: Path, model: RolloutAnswerer | None = None) -> Iterator[RolloutServer]:
    """A server of the model in `folder`, or of another, at a port of loopback while the block lasts."""
    context = data_server(shared_identity(secret, "rollout", "tllm rollout", make=True))
    server = QuestionServer(model or RolloutModel.open(str(folder)), SAMPLING, ("127.0.0.1", 0), context)
    with in_a_thread(server):
        yield server


@contextmanager
def cut(folder: Path, text: str) -> Iterator[LeadingModel]:
    """The model in `folder` divided by a plan, each rank a thread, while the block lasts."""
    whole = RolloutModel.open(str(folder))
    plan = Plan.parse(text, whole.spec.num_layers)
    links = local_links(plan)
    teams = [
        AnsweringTeam(plan, rank, {wire: link for wire, link in links.items() if rank in wire[:2]})
        for rank in range(plan.world_size)
    ]
    parts = [replace(whole, plan=plan, rank=rank, groups=team.groups) for rank, team in enumerate(teams)]
    following = [
        Thread(target=team.follow, args=(part, SAMPLING)) for team, part in zip(teams[1:], parts[1:], strict=True)
    ]
    for thread in following:
        thread.start()
    try:
        yield LeadingModel(parts[0], teams[0])
        assert not any(team.is_broken.is_set() for team in teams)
    finally:
        for team in teams:
            team.interrupt()
        for thread in following:
            thread.join()
