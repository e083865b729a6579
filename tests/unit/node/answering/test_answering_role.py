"""A node that takes a role: who hears of what it reads, and when it reads no more."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Gone
from tllm.cluster.messages import TakeRole
from tllm.cluster.weight_messages import ModelFileFacts
from tllm.core.errors import LinkClosed
from tllm.node.answering import answering_role
from tllm.node.answering.answering_role import AnsweringRole
from tllm.training.teachers.teacher_messages import TEACHING


def test_who_reads_the_model_of_a_role_tells_of_it_and_stops_when_the_node_is_to_do_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampler of an adapter reads its model when a run comes, and read on for minutes where the node was awaited. If
    the coordinator was lost meanwhile, the run was told that the node cannot sample, and ended."""
    files: list[Any] = []

    def read(order: Any, weights: Any, device: Any, groups: Any, progress: Any) -> Any:
        files.append(weights)
        progress(1, 2)
        return SimpleNamespace(name="m")

    monkeypatch.setattr(answering_role, "ANSWERERS", {"teacher": (TEACHING, read)})
    heard, orders = list[tuple[int, int]](), queue.SimpleQueue[object]()
    is_gone = False

    def fetch(file: str, start: int, stop: int) -> bytes:
        if is_gone:
            raise Gone("the coordinator went away before it answered ReadBytes")
        return bytes(stop - start)

    control = SimpleNamespace(fetch=fetch, inbox=SimpleNamespace(asker=None, orders=orders))
    given: Any = (
        SimpleNamespace(address=("127.0.0.1", 0)),
        Authority.create().identity("east"),
        torch.device("cpu"),
        control,
    )
    file = ModelFileFacts("model.safetensors", 2**20, b"")
    order = TakeRole(role="teacher", model="m", config="{}", folder="/nowhere", files=(file,))
    role = AnsweringRole(order, *given, lambda *read: heard.append(read))
    assert heard == [(1, 2)]
    assert files[0].read(file.name, 0, 2**17) == bytes(2**17)
    is_gone = True
    with pytest.raises(LinkClosed, match="the coordinator went away"):
        files[0].read(file.name, 2**17, 2**18)
    orders.put("another part")
    with pytest.raises(LinkClosed, match="this node has the role no more"):
        files[0].read(file.name, 2**17, 2**18)
    role.close()
