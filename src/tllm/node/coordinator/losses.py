"""Lost nodes: which one is to blame, and the policy that ends a job with its first loss."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, Protocol

from tllm.core.errors import LinkError, TllmError
from tllm.node.coordinator.job import ClusterJob
from tllm.node.coordinator.membership import Membership

BLAME_SECONDS = 0.3
"""How long to wait for more after a first loss: the links of a dead node's neighbours may fail before it is missed."""


class Loss(NamedTuple):
    """A node that had a rank, and what it was lost by."""

    node: str
    error: TllmError


KEPT = 20
"""Losses that are remembered when all is well again."""


class Losses:
    """The losses since all was well, in the order in which they were noticed until `cause` is asked for.

    `total` counts all that there ever were, and `recent` has the newest of them.
    """

    def __init__(self) -> None:
        self._losses: list[Loss] = []
        self.total = 0
        self.recent: deque[Loss] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def first(self) -> Loss | None:
        return self._losses[0] if self._losses else None

    def add(self, loss: Loss) -> None:
        self._losses.append(loss)
        self.recent.append(loss)
        self.total += 1

    def clear(self) -> None:
        self._losses.clear()

    def cause(self) -> Loss | None:
        """The node that failed first by itself. It is put before those whose links to it broke as a consequence."""
        self._losses.sort(key=lambda loss: isinstance(loss.error, LinkError))
        return self.first


class LossPolicy(Protocol):
    """What a coordinator does about lost nodes."""

    async def run(self) -> None:
        """Runs beside the coordinator; may return at once."""

    def on_loss(self, node: str, error: TllmError) -> None:
        """A node is gone."""

    def on_break(self) -> None:
        """A rank can compute no more, though its node is here and waits for another assignment."""

    def blamed(self, error: TllmError) -> TllmError:
        """The error of the node that is at fault, where an epoch could not begin because of this one."""


class EndOnLoss:
    """The first loss of a rank ends the job, with the error of the node that failed first by itself."""

    def __init__(self, job: ClusterJob, members: Membership) -> None:
        self._job, self._members = job, members
        self._losses = Losses()

    async def run(self) -> None:
        """There is nothing to do until a node is lost."""

    def on_loss(self, node: str, error: TllmError) -> None:
        """If the node had a rank, it is soon known who failed first by itself, and the job fails with that."""
        member = self._members.state.member(node)
        if member is None or member.rank is None:
            return
        self._losses.add(Loss(node, error))
        if len(self._losses) == 1:
            asyncio.get_running_loop().call_later(BLAME_SECONDS, self._conclude)

    def on_break(self) -> None:
        raise AssertionError("a part that does not outlive its wires ends with them")

    def blamed(self, error: TllmError) -> TllmError:
        return self._job.fault or error

    def _conclude(self) -> None:
        if len(self._losses) and self._job.fault is None:
            cause = self._losses.cause()
            assert cause is not None
            self._job.fail(cause.error)
