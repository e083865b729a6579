"""What the cluster's state comes to in numbers."""

from __future__ import annotations

from tests.unit.cluster.kits import joined
from tllm.cluster.messages import Heartbeat
from tllm.cluster.state import NodeHeard, NodeLost, Planned, apply
from tllm.node.coordinator.status_report import engine_stats, report
from tllm.server.http.metrics import Metrics
from tllm.spec.plan import Plan


def test_what_nodes_refused_is_summed_and_never_counts_down() -> None:
    state = joined("a", "b")
    metrics = Metrics("m")
    for node, links, frames in (("a", 2.0, 0.0), ("b", 1.0, 3.0)):
        state = apply(state, NodeHeard(node, Heartbeat(stats={"refused_links": links, "refused_frames": frames}), 1.0))
    stats = engine_stats(state)
    assert (stats["refused_links"], stats["refused_frames"]) == (3.0, 3.0)
    assert b"tllm_refused_frames_total{engine=" in metrics.render(stats)
    after = engine_stats(apply(state, NodeLost("b", "gone")))
    assert (after["refused_links"], after["refused_frames"]) == (2.0, 0.0)
    rendered = metrics.render(after).decode()
    assert 'tllm_refused_links_total{engine="0",model_name="m"} 3.0' in rendered
    assert 'tllm_refused_frames_total{engine="0",model_name="m"} 3.0' in rendered


def test_memory_is_told_of_each_node_that_is_here() -> None:
    state = joined("a", "b")
    metrics = Metrics("m")
    for node, held in (("a", 5), ("b", 7)):
        state = apply(state, NodeHeard(node, Heartbeat(rss_bytes=held, peak_bytes=held + 1), 1.0))
    rendered = metrics.render(engine_stats(state)).decode()
    assert 'tllm_rss_bytes{engine="0",model_name="m",node="b"} 7.0' in rendered
    assert 'tllm_peak_bytes{engine="0",model_name="m",node="a"} 6.0' in rendered
    assert 'tllm_memory_bytes{engine="0",model_name="m",node="a"} 1.073741824e+09' in rendered
    rendered = metrics.render(engine_stats(apply(state, NodeLost("b", "gone")))).decode()
    assert 'tllm_rss_bytes{engine="0",model_name="m",node="a"} 5.0' in rendered and 'node="b"' not in rendered
    (one, _) = report(state)["nodes"]
    assert (one["rss_bytes"], one["peak_bytes"], one["memory_given"], one["device"]) == (5, 6, False, "")


def test_ranks_without_layers_are_told_of_too() -> None:
    """A run with a parameter server, or with a node that only lends its memory, had no report at all."""
    state = apply(joined("a", "b", "c", "d"), Planned(Plan.parse("dp=2,servers=1", 4), tuple("abcd")))
    nodes = report(state)["nodes"]
    assert [node["rank"] for node in nodes] == [0, 1, None, None]
    assert [node["layers"] for node in nodes] == [[0, 4], [0, 4], None, None]
    assert [node["role"] for node in nodes] == ["", "", "server", ""]
