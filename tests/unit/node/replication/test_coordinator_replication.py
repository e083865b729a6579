"""What a coordinator tells its nodes of the replicas of its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tllm.cluster.messages import ReplicaPlace, Replicas
from tllm.node.replication.coordinator_replication import CoordinatorReplication

PLACES = tuple(ReplicaPlace(f"{node}/1", "127.0.0.1", 4711) for node in "abc")


def test_a_node_that_comes_back_at_once_is_told_where_the_replicas_are() -> None:
    """A channel was known by its id, which the next one may have where it lies in memory: its node was told nothing."""
    told: list[Replicas] = []

    class Channel:
        def post(self, message: Replicas) -> None:
            told.append(message)

    channels: dict[str, Any] = {"a": Channel()}
    replication = CoordinatorReplication.__new__(CoordinatorReplication)
    replica: Any = SimpleNamespace(raft=SimpleNamespace(log=SimpleNamespace(configuration=PLACES)))
    coordinator: Any = SimpleNamespace(members=SimpleNamespace(channels=channels))
    replication._replica, replication._coordinator, replication._told = replica, coordinator, {}
    for _ in range(2):
        replication._tell_nodes()
    assert told == [Replicas(PLACES)], "once"
    del channels["a"]
    channels["a"] = Channel()
    replication._tell_nodes()
    assert told == [Replicas(PLACES)] * 2
