"""`Outcome`: what was predicted of a run beside what was measured, as the run's folder keeps both; and what it teaches.

A survey that foretold something else than what came is corrected by one factor on all that is computed: the one with
which the same prediction would have been right. The next prediction, of this plan or another, begins there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.planner.measured.survey import Survey

VERSION = 1
FILE = "prediction.json"

WARM = 2
"""Steps, or requests, at the beginning that do not count."""

MAX_FACTOR = 8.0
"""The largest factor; what would need more is not the machines' speed."""

HALVINGS = 30


class StepNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training step: `memory` of the rank that has most, `bytes_sent` by all ranks."""

    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    bubble: float | None = None
    memory: int | None = None
    bytes_sent: int | None = None


class ReplyNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests saw: seconds to the first token and from one to the next, tokens/s of all together."""

    first_token: float
    per_token: float
    tokens_per_second: float
    memory: int | None = None


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="train", forbid_unknown_fields=True):
    """`steps` were measured; of each number their median."""

    version: int = VERSION
    plan: str
    microbatch_size: int
    steps: int
    predicted: StepNumbers
    measured: StepNumbers


class ServingOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="serve", forbid_unknown_fields=True):
    """`requests` were measured, with so many tokens on an average, so many at once: what was predicted is of these.

    `acceptance`: of tokens that could be drafted, the part that was right; None where none might be.
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


Outcome = TrainingOutcome | ServingOutcome


def save_outcome(outcome: Outcome, path: Path) -> None:
    """Write it for `read_outcome`. ConfigError where that cannot be."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "give a folder that can be written") from error


def read_outcome(path: Path) -> Outcome:
    """ConfigError for a file that is none."""
    try:
        outcome: Outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} is not the outcome of a run: {error}", "a run writes it at its end") from error
    return outcome


def median(numbers: Sequence[float | None]) -> float | None:
    """Of those after the first few, None where one is not known."""
    counted = [one for one in numbers[WARM:] or numbers if one is not None]
    return statistics.median(counted) if counted and None not in numbers else None


def refitted(survey: Survey, predict: Callable[[Survey], float], measured: float) -> tuple[Survey, float]:
    """The survey with which `predict` gives the measured seconds, and the factor by which all computing is slower.

    More time of computing never makes a prediction less, so the factor is found by halving, between 1/MOST and MOST.
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
