"""Errors across the control wire: each of ours keeps its kind, words and hint, and is raised again at the other end."""

from __future__ import annotations

from tllm.cluster.messages import Failure, Kind, Refused
from tllm.core.errors import (
    AuthError,
    CapacityError,
    ClusterError,
    ConfigError,
    LinkError,
    ModelError,
    NonFiniteError,
    PlanError,
    RequestError,
    TllmError,
    WeightsError,
)

# The narrower class stands before the wider one that it belongs to.
KINDS: dict[Kind, type[TllmError]] = {
    "model": ModelError,
    "config": ConfigError,
    "capacity": CapacityError,
    "plan": PlanError,
    "link": LinkError,
    "cluster": ClusterError,
    "auth": AuthError,
    "weights": WeightsError,
    "nan": NonFiniteError,
    "request": RequestError,
    "run": TllmError,
}


def kind_of(error: BaseException) -> Kind:
    """The kind under which an error travels."""
    return next((kind for kind, known in KINDS.items() if isinstance(error, known)), "run")


def refused(error: TllmError) -> Refused:
    """An error as an answer."""
    return Refused(error.message, error.hint, kind_of(error), error.peer)


def failure(error: BaseException) -> Failure:
    """An error as a node's last message; one that is not ours by its type and text."""
    if isinstance(error, TllmError):
        return Failure(message=error.message, hint=error.hint, kind=kind_of(error))
    return Failure(message=f"{type(error).__name__}: {error}", hint="this is a fault of tllm or of the machine")


def printable(words: str) -> str:
    """What somebody says whom nobody knows yet, for a terminal or a log: without what moves the cursor, or begins a
    line that we did not write."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in words)


def error_of(said: Refused | Failure, speaker: str = "") -> TllmError:
    """The error that was sent, to be raised here; `speaker` goes before its words."""
    words = said.reason if isinstance(said, Refused) else said.message
    error = KINDS[said.kind](f"{speaker}: {words}" if speaker else words, said.hint)
    error.peer = said.peer if isinstance(said, Refused) else None
    return error
