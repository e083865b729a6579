"""`AnsweringRank`: one rank's part in a model that answers training runs elsewhere, from the assignment on.

It is to `tllm teach --nodes` and `tllm rollout --nodes` what `ServingRank` is to `tllm serve --nodes`: a rank of a
plan, in epochs that the coordinator begins. It then answers as nodes do that have a role beside a training run's plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Loaded, Prepared, TakeRole
from tllm.cluster.settings import AnswerSettings
from tllm.cluster.tls import data_server
from tllm.comm.links.connect import Listener
from tllm.core.errors import LinkClosed
from tllm.core.memory import give_back_memory
from tllm.devices.memory import forget_peak, held_memory
from tllm.engine.driver import CloseRing, Command
from tllm.node.answering.answerers import ANSWERERS
from tllm.node.answering.answering_part import AnsweringDoor, AnsweringPart
from tllm.node.answering.answering_team import AnsweringTeam
from tllm.node.roles.control import Control
from tllm.node.roles.role import Role, fetched, model_source
from tllm.node.roles.rollout_model import RolloutModel
from tllm.spec.process_groups import RoleName
from tllm.training.questions.shared_secret import shared_identity
from tllm.weights.byte_source import Fetch
from tllm.weights.load import Progress

COMMANDS: Mapping[RoleName, str] = {"teacher": "tllm teach", "rollout": "tllm rollout"}
"""Which command opens a cluster of such ranks."""


class AnsweringRank:
    """Connects the links; then `load` reads the weights and opens the door, and `run` answers until the epoch ends.

    The first rank has the door, at the same address in every epoch: runs that dial again find it there.
    """

    outlives = True

    def __init__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None = None
    ) -> None:
        assert isinstance(assign.settings, AnswerSettings), "serving and training are other parts"
        self.rank = assign.rank
        self._assign, self._settings = assign, assign.settings
        is_read = assign.files or assign.hub or self._settings.role == "teacher"  # whose weights no run sends
        self._files = model_source(assign, fetch) if is_read else None
        self._team = AnsweringTeam.connect(assign, assign.plan, identity, listener)
        self._part: AnsweringPart | None = None

    def prepared(self) -> Prepared:
        """Nothing: what a rank holds of the model, its weights are checked for when they are read."""
        return Prepared(rank=self.rank)

    def load(self, progress: Progress) -> Loaded:
        """Read this rank's weights, if they are to be here before a run comes, and listen for runs if it is the first.

        AuthError for a secret that is none, ClusterError for an address that cannot be listened at.
        """
        start, device = time.monotonic(), torch.device(self._settings.device)
        give_back_memory()
        forget_peak(device)  # of the part before, in another epoch
        conversation, _ = ANSWERERS[self._settings.role]
        team = self._team if self._assign.plan.world_size > 1 else None
        self._part = AnsweringPart(conversation, self._opened(device, progress), team, self._door())
        return Loaded(
            rank=self.rank,
            bytes_read=0 if self._files is None else self._files.bytes_read,
            fetched=0 if self._files is None else fetched(self._files),
            seconds=time.monotonic() - start,
            rss_bytes=held_memory(device),
        )

    def run(self, control: Control) -> None:
        """Answer until the coordinator wants something else. LinkClosed where another rank is lost."""
        assert self._part is not None, "load comes before run"
        if self._part.run(control.inbox.orders.empty):
            raise LinkClosed("another rank that computes the model is lost")

    def stats(self) -> dict[str, float]:
        return {} if self._part is None else self._part.stats()

    def link_bytes(self) -> dict[str, int]:
        return self._team.link_bytes()

    def command(self, command: Command) -> None:
        if isinstance(command, CloseRing):
            self.interrupt()

    def interrupt(self) -> None:
        if self._part is not None:
            self._part.interrupt()
        self._team.interrupt()

    def close(self) -> None:
        self._team.close()
        if self._part is not None:
            self._part.close()
            self._part = None  # the next one needs the memory

    def _opened(self, device: torch.device, progress: Progress) -> Any:
        """The model, or this rank's part of one."""
        assign, settings = self._assign, self._settings
        order = TakeRole(
            role=settings.role,
            model=settings.model,
            rank=self.rank,
            plan=assign.plan,
            config=assign.config,
            vocabulary=settings.vocabulary,
            dtype=settings.dtype,
        )
        _, open_answerer = ANSWERERS[settings.role]
        model = open_answerer(order, self._files, device, self._team.groups, progress)
        if isinstance(model, RolloutModel) and self.rank == 0 and assign.folder:
            return replace(model, folder=Path(assign.folder))  # which is compared with what a run has
        return model

    def _door(self) -> AnsweringDoor | None:
        settings = self._settings
        if self.rank:
            return None
        identity = shared_identity(Path(settings.secret), settings.role, COMMANDS[settings.role])
        return AnsweringDoor((settings.host, settings.port), data_server(identity))
