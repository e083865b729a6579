from __future__ import annotations

from typing import Any

from tllm.server.live.cluster_events import happenings


def node(name: str, phase: str = "ready", reason: str = "", rank: int | None = 0) -> dict[str, Any]:
    return {"node": name, "host_name": "box", "phase": phase, "reason": reason, "rank": rank}


READY = {"epoch": 1, "plan": "pp=2", "ready": True, "nodes": [node("a"), node("b")], "losses": 0}


def test_the_beginning_is_told_once() -> None:
    assert list(happenings({}, READY)) == [
        ("info", "a has joined from box"),
        ("info", "b has joined from box"),
        ("info", "epoch 1 begins: plan pp=2"),
        ("info", "requests are served"),
    ]
    assert list(happenings(READY, READY)) == []


def test_a_loss_is_told_with_its_cause_and_its_consequence() -> None:
    lost = {
        **READY,
        "ready": False,
        "doing": "mends epoch 1",
        "losses": 1,
        "recent_losses": ["node b went away"],
        "nodes": [node("a", "broken", "its link broke"), node("b", "lost", "went away")],
    }
    assert list(happenings(READY, lost)) == [
        ("error", "a cannot go on: its link broke"),
        ("error", "node b went away"),
        ("warning", "requests wait: mends epoch 1"),
    ]
    after = {**lost, "ready": True, "epoch": 2, "plan": "pp=1", "nodes": [node("a")]}
    assert list(happenings(lost, after)) == [
        ("warning", "b has left"),
        ("info", "epoch 2 begins: plan pp=1"),
        ("info", "requests are served"),
    ]


def test_a_loss_that_was_mended_between_two_looks_is_told() -> None:
    after = {**READY, "epoch": 3, "losses": 3, "recent_losses": ["long ago", "node b went away", "node a went away"]}
    assert list(happenings({**READY, "losses": 1}, after)) == [
        ("error", "node b went away"),
        ("error", "node a went away"),
        ("info", "epoch 3 begins: plan pp=2"),
    ]


def test_the_loss_of_a_node_without_a_rank_is_told_and_that_it_is_back() -> None:
    """Nothing stops for it, so that it is no loss that counts; the page and `tllm top` told of it nowhere."""
    spare = {**READY, "nodes": [*READY["nodes"], node("c", "joined", rank=None)]}
    lost = {**READY, "nodes": [*READY["nodes"], node("c", "lost", "node c went away", None)]}
    assert list(happenings(spare, lost)) == [("warning", "node c went away")]
    assert list(happenings(lost, lost)) == []
    assert list(happenings(lost, spare)) == [("info", "c has joined from box")]


def test_advice_is_told_when_it_changes() -> None:
    advised = {**READY, "advice": "pp=1 would be faster"}
    assert list(happenings(READY, advised)) == [("warning", "pp=1 would be faster")]
    assert list(happenings(advised, advised)) == list(happenings(advised, READY)) == []
