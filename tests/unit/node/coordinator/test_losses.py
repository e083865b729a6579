"""Which of several lost nodes is to blame, without any node."""

from __future__ import annotations

from tllm.core.errors import ClusterError, LinkError
from tllm.node.coordinator.losses import Loss, Losses


def test_who_failed_by_itself_stands_before_those_whose_links_broke() -> None:
    losses = Losses()
    assert losses.cause() is None and losses.first is None and not losses
    neighbour, dead, later = (
        Loss("a", LinkError("b hung up")),
        Loss("b", ClusterError("gone")),
        Loss("c", ClusterError("")),
    )
    for loss in (neighbour, dead, later):
        losses.add(loss)
    assert losses.first == neighbour and len(losses) == 3
    assert losses.cause() == dead and losses.first == dead
    losses.clear()
    assert losses.cause() is None
