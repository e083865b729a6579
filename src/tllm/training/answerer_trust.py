"""Whether the programs that a job names trust its run: looked at when a run is opened, before anything else is made."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from tllm.core.errors import AuthError, LinkError
from tllm.training.job.job import Job
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.answerer_pool import NamedAnswerers
from tllm.training.questions.run_connection import Conversation, RunConnection
from tllm.training.rollout_servers.remote_rollouts import named_servers
from tllm.training.rollout_servers.rollout_messages import SAMPLING
from tllm.training.teachers.teacher_messages import TEACHING
from tllm.training.teachers.teacher_pool import named_teachers

LOOK_SECONDS = 1.0
"""How long all of them are waited for. Who answers later, or not at all, is no fault yet: the run waits for them."""


def check_trust(job: Job) -> None:
    """AuthError where the secret of a job cannot be read or is none, or where one that can be reached has another."""
    faults: list[AuthError] = []
    looks = [
        threading.Thread(target=_look, args=(conversation, named, number, faults), daemon=True)
        for conversation, named in _named(job)
        for number in range(len(named.addresses))
    ]
    until = time.monotonic() + LOOK_SECONDS
    for look in looks:
        look.start()
    for look in looks:
        look.join(max(0.0, until - time.monotonic()))
    if faults:
        raise faults[0]


def _named(job: Job) -> Iterator[tuple[Conversation[Any, Any, Any], NamedAnswerers]]:
    if job.distill is not None and job.distill.teachers:
        yield TEACHING, named_teachers(job.distill)
    if job.rollouts is not None and job.rollouts.rollout_servers:
        yield SAMPLING, named_servers(job.rollouts, job.task)


def _look(
    conversation: Conversation[Any, Any, Any], named: NamedAnswerers, number: int, faults: list[AuthError]
) -> None:
    host, port = named.addresses[number]
    try:
        with contextlib.suppress(LinkError):
            RunConnection.dial(conversation, AnswererPlace(f"{host}:{port}", (host, port)), named.context).close()
    except AuthError as error:
        faults.append(error)
