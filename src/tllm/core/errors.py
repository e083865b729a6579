"""Every error a user can meet, as one tree; each carries a `hint` that says what to do.

    TllmError                1   the run failed
    ├── ConfigError          2   an option, a key or a file that the user wrote is wrong
    │   └── ModelError       2   a config.json that this version cannot run as written
    ├── PlanError            3   the plan cannot be cut, or does not fit
    │   └── CapacityError    3   memory or cache pages too small for what was asked
    ├── ClusterError         4   a node or a link failed; names the one at fault
    │   └── LinkError        4   one directed wire between two ranks
    │       ├── LinkTimeout  4   its deadline passed
    │       ├── LinkClosed   4   the other end went away
    │       └── FrameError   4   what arrived is not what the plan says
    ├── AuthError            5   a token, a certificate or a key was refused
    ├── WeightsError         6   weight files that are missing, torn or untrue
    ├── NonFiniteError       7   a loss, gradient, weight or logit is no number
    └── RequestError         -   one request cannot be served (HTTP 400); others go on

The number is the exit code of the command (docs/reference/exit-codes.md). `nearest` makes a hint from a mistyped word,
`counted` says how many there are of something, `decoded` reads what another process sent.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")

INTERRUPTED = 130
"""The exit code of what its operator has ended before it was done."""

HINT = "\nhint: "
"""What stands between message and hint in an error's text."""


class TllmError(Exception):
    """Base of every error meant for users: `message` says what and why, `hint` what to do.

    `peer`: of a failure between two ranks, the other one; None where whoever raises it is at fault, or nobody knows.
    """

    exit_code = 1
    peer: int | None = None

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}{HINT}{self.hint}" if self.hint else self.message


class ConfigError(TllmError):
    """An option, a key or a file that the user wrote is wrong."""

    exit_code = 2


class ModelError(ConfigError):
    """A model folder that this version cannot run exactly as its config.json says."""


class PlanError(TllmError):
    """A plan that cannot be cut, does not cover the model once, or does not fit."""

    exit_code = 3


class CapacityError(PlanError):
    """Memory or cache pages too small for what was asked."""


class ClusterError(TllmError):
    """A node or a link failed; the message names it."""

    exit_code = 4


class LinkError(ClusterError):
    """One directed wire between two ranks failed."""


class LinkTimeout(LinkError):
    """The other end of a link did not send or take data before the deadline."""


class LinkClosed(LinkError):
    """The other end of a link went away."""


class FrameError(LinkError):
    """A frame whose header, size or checksum is not what the plan says."""


class AuthError(TllmError):
    """A token, certificate or key was refused."""

    exit_code = 5


class WeightsError(TllmError):
    """Weight files that are missing, torn or do not match their own index."""

    exit_code = 6


class NonFiniteError(TllmError):
    """A loss, gradient or weight in training is infinite or no number, and the message names where it went bad; or all
    that a served model comes to for a text is, whoever asks (HTTP 500)."""

    exit_code = 7


class RequestError(TllmError):
    """One request that cannot be served as written; every other request goes on."""

    def __init__(self, message: str, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint for a mistyped word: the known word that is most like it, or all known words. Where these are too many for
    a line, `otherwise` stands in their place, and the word must be more like one of them: of many some always are."""
    choices = sorted(known)
    alike = [choice for choice in choices if choice.lower() == word.lower()]
    close = alike or difflib.get_close_matches(word, choices, n=1, cutoff=0.7 if otherwise else 0.6)
    return f"did you mean {close[0]!r}?" if close else otherwise or "known: " + ", ".join(choices)


def counted(number: int, one: str, many: str = "") -> str:
    """How many there are, as a user reads it: `1 rank`, `3 ranks`, `1 row waits`.

    `one` is what stands behind a 1, `many` behind all else, 0 too; without it that is `one` with an s.
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was agreed: its own errors, and two that it lets through.

`except UNREADABLE` stands around every decoding of bytes from a network or a file.
"""

UNREADABLE_TOML = (ValueError, RecursionError)
"""What tomllib raises for a text that is none: its own error is a ValueError, as that of bytes that are no text, and
that of a number of more digits than Python reads."""


def toml_fault(error: BaseException) -> str:
    """What is wrong with such a text, without Python's advice to programs on how to have longer numbers read."""
    return str(error).partition("; use sys.")[0]


def decoded(
    content: bytes | bytearray,
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T],
    what: str = "",
    raises: type[TllmError] = FrameError,
) -> T:
    """A message from another process, as the decoder's type. An error for anything else; `what` says it in words."""
    try:
        return decoder.decode(content)
    except UNREADABLE as error:
        name = getattr(decoder.type, "__name__", str(decoder.type))
        raise raises(f"{what or f'not a {name}'}: {error}", "run the same tllm on every node") from error
