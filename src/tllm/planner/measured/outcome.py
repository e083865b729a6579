"""`Outcome`: what was predicted for a run and what was measured, as its folder keeps both (`prediction.json`).

A survey that led to a wrong prediction is corrected by one factor on all that is computed: the factor with which the
same prediction would have been right. The next prediction, of this plan or another, starts from the corrected survey.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tllm.core.errors import ConfigError
from tllm.planner.measured.survey import Survey

VERSION = 1
FILE = "prediction.json"

WARM = 2
"""Steps, or requests, at the beginning that do not count (warm-up)."""

MAX_FACTOR = 8.0
"""The largest factor; a larger error has another cause than the machines' speed."""

HALVINGS = 30
"""Of the logarithm of the factor, which is then known to 4 parts in 10^9."""


class StepNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training step: `memory` in bytes of the fullest rank, `bytes_sent` by all ranks. Then come seconds of each
    role, where there are several, and those of an evaluation, which are of no step."""

    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    bubble: float | None = None
    memory: int | None = None
    bytes_sent: int | None = None
    sampling: float | None = None
    rewards: float | None = None
    reference: float | None = None
    teacher: float | None = None
    policy: float | None = None
    evaluation: float | None = None


class ReplyNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests see: seconds to the first token, seconds from one token to the next, tokens per second of all
    requests together; `memory` in bytes of the fullest rank. An answer that is one token, or a pooled prompt's numbers,
    counts as one token, with no `per_token`."""

    first_token: float
    per_token: float | None
    tokens_per_second: float
    memory: int | None = None


class AnswerNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer to a training run: its seconds, and the tokens per second of what it is about; `memory` in bytes of the
    fullest rank."""

    seconds: float
    tokens_per_second: float
    memory: int | None = None


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="train", forbid_unknown_fields=True):
    """`steps` steps were measured; each number is their median."""

    version: int = VERSION
    plan: str
    microbatch_size: int
    steps: int
    predicted: StepNumbers
    measured: StepNumbers


class ServingOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="serve", forbid_unknown_fields=True):
    """`requests` requests were measured. The prediction is for their mean `prompt`, `reply` and
    `concurrency`.

    `acceptance`: the share of draft tokens that were accepted; None where no draft tokens were allowed.
    """

    version: int = VERSION
    plan: str
    requests: int
    prompt: int
    reply: int
    concurrency: int
    acceptance: float | None = None
    predicted: ReplyNumbers
    measured: ReplyNumbers


class AnsweringOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="answer", forbid_unknown_fields=True):
    """`answers` answers of a teacher, or of nodes that sample, were measured. The prediction is for their mean, as
    `about` says it in words."""

    version: int = VERSION
    plan: str
    answers: int
    about: str
    predicted: AnswerNumbers
    measured: AnswerNumbers


Outcome = TrainingOutcome | ServingOutcome | AnsweringOutcome


def save_outcome(outcome: Outcome, path: Path) -> None:
    """Write it as JSON. Raises ConfigError where the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "give a folder that can be written") from error


def median(numbers: Sequence[float | None]) -> float | None:
    """The median of all but the first few numbers; None where one of them is not known."""
    counted = [number for number in numbers[WARM:] or numbers if number is not None]
    return statistics.median(counted) if counted and None not in numbers else None


def refitted(survey: Survey, predict: Callable[[Survey], float], measured: float) -> tuple[Survey, float]:
    """The survey with which `predict` gives the measured seconds, and the factor by which all computing is slower in
    it.

    Slower computing never makes a prediction shorter, so the factor is found by bisection between 1 / MAX_FACTOR and
    MAX_FACTOR.
    """
    low, high = 1 / MAX_FACTOR, MAX_FACTOR
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if predict(survey.slower(middle)) < measured:
            low = middle
        else:
            high = middle
    factor = (low * high) ** 0.5
    return survey.slower(factor), factor
