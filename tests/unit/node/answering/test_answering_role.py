"""A node that takes a role tells how far it has read its model."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tllm.cluster.certificates import Authority
from tllm.cluster.messages import TakeRole
from tllm.node.answering import answering_role
from tllm.node.answering.answering_role import AnsweringRole
from tllm.training.teachers.teacher_messages import TEACHING


def test_who_reads_the_model_of_a_role_is_given_who_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(order: Any, weights: Any, device: Any, groups: Any, progress: Any) -> Any:
        progress(1, 2)
        return SimpleNamespace(name="m")

    monkeypatch.setattr(answering_role, "ANSWERERS", {"teacher": (TEACHING, read)})
    heard = list[tuple[int, int]]()
    given: Any = (
        SimpleNamespace(address=("127.0.0.1", 0)),
        Authority.create().identity("east"),
        torch.device("cpu"),
        SimpleNamespace(fetch=None, inbox=SimpleNamespace(asker=None, orders=queue.SimpleQueue())),
    )
    order = TakeRole(role="teacher", model="m", config="{}")
    role = AnsweringRole(order, *given, lambda *read: heard.append(read))
    role.close()
    assert heard == [(1, 2)]
