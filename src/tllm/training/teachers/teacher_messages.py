"""The messages between a run and a teacher elsewhere."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tllm.core.errors import FrameError
from tllm.training.questions.run_connection import Conversation

HiddenStateDtype = Literal["float32", "bfloat16", "float64"]
LogProbDtype = Literal["float32", "uint8"]
HIDDEN_STATE_TYPES: dict[str, str] = {"float32": "<f4", "bfloat16": "<i2", "float64": "<f8"}
"""How numbers of each travel, in numpy's letters."""


class Lesson(msgspec.Struct, frozen=True):
    """What a run wants of every row. `top_k` of 0 means all tokens; with a `kl_budget` it is the most of each place.

    `vocabulary` is the digest of the student's tokens (`vocabulary_digest`), of which its model has `vocab_size`.
    `hidden_states` are numbers, each once, of hidden states of the teacher's, which the run takes to have `hidden_size`
    columns (`objectives.hidden_state_loss`). With a budget `log_prob_dtype` may be "uint8" (`coded_log_probs`). What a
    `deterministic` run is told has bits that hang neither on threads nor on what was measured where it is answered.
    """

    top_k: int
    temperature: float
    vocab_size: int
    vocabulary: str
    kl_budget: float = 0.0
    hidden_states: tuple[int, ...] = ()
    hidden_size: int = 0
    hidden_state_dtype: HiddenStateDtype = "float32"
    log_prob_dtype: LogProbDtype = "float32"
    deterministic: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether log-probabilities of tokens travel as codes of a byte."""
        return self.log_prob_dtype == "uint8"

    @property
    def width(self) -> int:
        """Log-probabilities that there are of each token, at most: of the top k and the rest, or of all tokens."""
        return self.top_k + 1 if self.top_k else self.vocab_size

    @property
    def id_type(self) -> Literal["<u2", "<i4"]:
        """What ids of answers are: numbers of 2 bytes where the student's tokens all have one, else of 4."""
        return "<u2" if self.vocab_size <= 2**16 else "<i4"

    @property
    def hidden_state_bytes(self) -> int:
        """Of one place, all hidden states together."""
        each = np.dtype(HIDDEN_STATE_TYPES[self.hidden_state_dtype]).itemsize
        return len(self.hidden_states) * self.hidden_size * each


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One row: its ids, the tokens of each document, and the places whose next token is asked for. All int32."""

    number: int
    ids: bytes
    lengths: tuple[int, ...]
    places: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Of each place asked for the K tokens, `id_type` [P, K], and log-probabilities, float32 [P, width]; or an `error`.

    With a budget a place has tokens as `counts` says, uint16 [P], one after another, and one log-probability more than
    tokens; `lost` is what is lost of all places together (`top_k_choice`), in nats. `hidden_states` are those that
    were asked for, one after another, each [P, hidden_size] in the dtype that was asked for. Where the lesson
    `is_coded`, `log_probs` are codes of the tokens, uint8, and those of all others together are `rests`, float32 [P].
    """

    number: int
    ids: bytes = b""
    log_probs: bytes = b""
    error: str = ""
    counts: bytes = b""
    lost: float = 0.0
    hidden_states: bytes = b""
    rests: bytes = b""

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """How many tokens each place has, where there is a budget. FrameError where the bytes are no numbers."""
        if len(self.counts) % 2:
            raise FrameError(f"{len(self.counts)} bytes of numbers of 2 bytes each")
        return np.frombuffer(self.counts, dtype="<u2").astype(np.int64)


TEACHING = Conversation(
    "teacher",
    introductions=msgspec.msgpack.Decoder(Lesson),
    questions=msgspec.msgpack.Decoder(Question),
    answers=msgspec.msgpack.Decoder(Answer),
)


def packed(numbers: NDArray[Any]) -> bytes:
    """Whole numbers as int32."""
    return numbers.astype("<i4").tobytes()


def unpacked(content: bytes) -> NDArray[np.int64]:
    """What `packed` made. FrameError where the bytes are not whole numbers."""
    if len(content) % 4:
        raise FrameError(f"{len(content)} bytes of numbers of 4 bytes each")
    return np.frombuffer(content, dtype="<i4").astype(np.int64)
