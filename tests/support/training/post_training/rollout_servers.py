"""Rollout servers of tests: served in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.training.post_training.teachers import in_a_thread
from tllm.cluster.tls import data_server
from tllm.node.roles.rollout_model import RolloutModel
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
