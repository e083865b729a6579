"""`AnsweringRole`: a node that answers a training run, as a teacher, as a reward model or by sampling completions.

It does what `tllm teach` and `tllm rollout` do on machines outside the cluster. But its model comes from the
coordinator, where theirs comes from a folder, and the cluster's certificates take the place of a shared secret.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from tllm.cluster.certificates import Identity
from tllm.cluster.channel import Gone
from tllm.cluster.messages import RoleTaken, TakeRole
from tllm.cluster.tls import data_server
from tllm.cluster.weight_messages import role_file
from tllm.comm.links.connect import Listener
from tllm.core.errors import LinkClosed
from tllm.engine.driver import CloseRing, Command
from tllm.node.answering.answerers import ANSWERERS
from tllm.node.answering.answering_part import AnsweringDoor, AnsweringPart
from tllm.node.answering.answering_team import BROKEN, AnsweringTeam, TeamPlace, team_number
from tllm.node.roles.control import Control
from tllm.node.weights.model_folder import same_model
from tllm.training.step.rank_groups import Groups
from tllm.weights.byte_source import ByteSource, LocalFiles, RemoteFiles
from tllm.weights.load import Progress


class AnsweringRole:
    """A `Role` beside any plan, which runs until the node gets a part in one or the cluster ends, or one of those that
    compute the model with it is lost.

    The first of them listens on the host of the `listener` at any free port, and answers whom the coordinator has named
    and nobody else in the cluster. ConfigError or WeightsError where the model of the role cannot be had here; what
    `progress` raises, which hears of the bytes that are read.
    """

    outlives = True

    def __init__(
        self,
        order: TakeRole,
        listener: Listener,
        identity: Identity,
        device: torch.device,
        control: Control,
        progress: Progress,
    ) -> None:
        conversation, open_answerer = ANSWERERS[order.role]
        with contextlib.ExitStack() as unmade:
            team: AnsweringTeam | None = None
            if order.places:
                assert order.plan is not None, "several nodes have a plan"
                placed = TeamPlace(order.team, 1, order.rank, order.places)
                team = AnsweringTeam.connect(placed, order.plan, identity, listener)
                unmade.callback(team.close)  # the others wait for this rank
            groups = Groups() if team is None else team.groups
            model = open_answerer(order, _weights(order, control), device, groups, progress)
            place, inbox = (listener.address[0], 0), control.inbox
            door = AnsweringDoor(place, data_server(identity), lambda: inbox.asker) if order.rank == 0 else None
            self._part = AnsweringPart(conversation, model, team, door)
            unmade.pop_all()
        self.taken = RoleTaken(order.role, self._part.port, order.team)

    @property
    def is_over(self) -> bool:
        """Whether it answers no more."""
        return self._part.is_over

    def run(self, control: Control) -> None:
        """Answer until the coordinator wants something else of this node."""
        self._part.run(control.inbox.orders.empty)

    def stats(self) -> dict[str, float]:
        broken = {BROKEN: team_number(self.taken.team)} if self._part.is_broken else {}
        return {**self._part.stats(), **broken}

    def link_bytes(self) -> dict[str, int]:
        """None: a run's questions go over connections of their own."""
        return {}

    def command(self, command: Command) -> None:
        if isinstance(command, CloseRing):
            self.interrupt()

    def interrupt(self) -> None:
        self._part.interrupt()

    def close(self) -> None:
        self._part.close()


def _weights(order: TakeRole, control: Control) -> ByteSource | None:
    """The model's files on this node, if they are the same, else the coordinator's, read as they are needed: LinkClosed
    once the node is to do something else, or its coordinator is gone. None where all weights come from the run."""
    folder = Path(order.folder)
    if order.files and same_model(folder, order.files):
        return LocalFiles(folder)
    if order.role == "rollout" and not order.is_base:
        return None

    def ask(file: str, start: int, stop: int) -> bytes:
        if not control.inbox.orders.empty():
            raise LinkClosed("this node has the role no more")
        try:
            return control.fetch(role_file(order.role, file), start, stop)
        except Gone as error:  # the node looks for another, and the run asks again
            raise LinkClosed(error.message) from error

    return RemoteFiles(ask, {file.name: file.size for file in order.files})
