"""`AnsweringRole`: a node answers a training run as a teacher or a rollout server does that a user has started; or as a
reward model.

What `tllm teach` and `tllm rollout` find in a folder comes from the coordinator here, and the cluster's certificates
stand in the place of a secret.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import RoleTaken, TakeRole
from tllm.cluster.tls import data_server
from tllm.cluster.weight_messages import role_file
from tllm.devices.choose import CPU, compute_on
from tllm.engine.driver import CloseRing, Command
from tllm.node.roles.control import Control
from tllm.node.roles.rollout_model import RolloutModel
from tllm.node.weights.model_folder import same_model
from tllm.spec.families import spec_from_config
from tllm.spec.process_groups import RoleName
from tllm.training.questions.question_server import Answerer, QuestionServer
from tllm.training.questions.run_connection import Conversation
from tllm.training.reward_models.reward_messages import SCORING
from tllm.training.reward_models.reward_model import RewardModel
from tllm.training.rollout_servers.rollout_messages import SAMPLING
from tllm.training.teachers.teacher_messages import TEACHING
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.weights.byte_source import ByteSource, Fetch, LocalFiles, RemoteFiles

LOOK_SECONDS = 0.2

OpenAnswerer = Callable[[TakeRole, torch.device, Fetch], Answerer[Any, Any, Any]]


class AnsweringRole:
    """A `Role` beside any plan, which runs until the node gets a part in one or the cluster ends.

    It listens on `host` at any free port, and answers whom the coordinator has named and nobody else in the cluster.
    ConfigError or WeightsError where the model of the role cannot be had here.
    """

    outlives = True

    def __init__(self, order: TakeRole, host: str, identity: Identity, device: torch.device, control: Control) -> None:
        conversation, open_answerer = ANSWERERS[order.role]
        answerer, inbox = open_answerer(order, device, control.fetch), control.inbox
        place, context = (host, 0), data_server(identity)
        self._server = QuestionServer(answerer, conversation, place, context, lambda: inbox.asker)
        self._over = threading.Event()
        self.taken = RoleTaken(order.role, self._server.address[1])

    @property
    def is_over(self) -> bool:
        """Whether it answers no more."""
        return self._over.is_set()

    def run(self, control: Control) -> None:
        """Answer until the coordinator wants something else of this node."""
        serving = threading.Thread(target=self._server.serve, name="tllm answers", daemon=True)
        serving.start()
        try:
            # What came while the model was loaded found no role to wake.
            while not self._over.wait(LOOK_SECONDS) and control.inbox.orders.empty():
                pass
        finally:
            self._over.set()
            self._server.close()
            serving.join()

    def stats(self) -> dict[str, float]:
        return {"answered": float(self._server.answered)}

    def link_bytes(self) -> dict[str, int]:
        """None: a run's questions go over connections of their own."""
        return {}

    def command(self, command: Command) -> None:
        if isinstance(command, CloseRing):
            self._over.set()

    def interrupt(self) -> None:
        self._over.set()

    def close(self) -> None:
        self._over.set()
        self._server.close()


def _teacher(order: TakeRole, device: torch.device, fetch: Fetch) -> TeacherModel:
    compute_on(CPU)
    source = _own_files(order) or _fetched_files(order, fetch)
    return TeacherModel.of(order.model, json.loads(order.config), source, order.vocabulary, order.dtype)


def _reward_model(order: TakeRole, device: torch.device, fetch: Fetch) -> RewardModel:
    compute_on(CPU)
    source = _own_files(order) or _fetched_files(order, fetch)
    return RewardModel.of(order.model, json.loads(order.config), source, order.dtype)


def _rollout_model(order: TakeRole, device: torch.device, fetch: Fetch) -> RolloutModel:
    """With weights of this node's own where it has them: the run sends what it lacks, but for those beside an
    adapter."""
    source = _own_files(order) or (_fetched_files(order, fetch) if order.is_base else None)
    config = json.loads(order.config)
    return RolloutModel(order.model, config, spec_from_config(config), order.vocabulary, source, device=device)


ANSWERERS: Mapping[RoleName, tuple[Conversation[Any, Any, Any], OpenAnswerer]] = {
    "teacher": (TEACHING, _teacher),
    "rollout": (SAMPLING, _rollout_model),
    "reward": (SCORING, _reward_model),
}
"""What is said in a role, and what opens its model."""


def _own_files(order: TakeRole) -> ByteSource | None:
    """The model's files on this node, if they are the same."""
    folder = Path(order.folder)
    return LocalFiles(folder) if order.files and same_model(folder, order.files) else None


def _fetched_files(order: TakeRole, fetch: Fetch) -> ByteSource:
    """The coordinator's files, read as they are needed."""

    def ask(file: str, start: int, stop: int) -> bytes:
        return fetch(role_file(order.role, file), start, stop)

    return RemoteFiles(ask, {file.name: file.size for file in order.files})
