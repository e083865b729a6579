"""Small things that the tests of the cluster make again and again."""

from __future__ import annotations

from tllm.cluster.messages import NodeFacts
from tllm.cluster.state import ClusterState, NodeJoined, apply


def facts(node: str = "a", port: int = 1) -> NodeFacts:
    return NodeFacts(node=node, host_name="box", memory_bytes=2**30, cores=2, host="127.0.0.1", port=port)


def joined(*nodes: str, at: float = 0.0) -> ClusterState:
    state = ClusterState(cluster="c")
    for node in nodes:
        state = apply(state, NodeJoined(node, facts(node), at))
    return state
