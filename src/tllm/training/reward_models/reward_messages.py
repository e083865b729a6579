"""The messages between a run and a reward model elsewhere: the ids of one text, and the score of its last token."""

from __future__ import annotations

import msgspec

from tllm.training.questions.run_connection import Conversation


class ScoringRun(msgspec.Struct, frozen=True):
    """A run that knows the reward model's tokens, of which there are `vocab_size`; `deterministic` as in a `Lesson`."""

    vocab_size: int
    deterministic: bool = False


class TextToScore(msgspec.Struct, frozen=True, array_like=True):
    """The ids of a prompt with its completion, as int32."""

    number: int
    ids: bytes


class TextScore(msgspec.Struct, frozen=True, array_like=True):
    """What the text is worth; or an `error`."""

    number: int
    score: float = 0.0
    error: str = ""


SCORING = Conversation(
    "reward model",
    introductions=msgspec.msgpack.Decoder(ScoringRun),
    questions=msgspec.msgpack.Decoder(TextToScore),
    answers=msgspec.msgpack.Decoder(TextScore),
)
