"""What a run and a teacher elsewhere say to each other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tllm.core.errors import FrameError
from tllm.training.questions.run_connection import Conversation


class Lesson(msgspec.Struct, frozen=True):
    """What a run wants of every row. `top_k` of 0 means all tokens; with a `kl_budget` it is the most of each place.

    `vocabulary` is the digest of the student's tokens (`vocabulary_digest`), of which its model has `vocab_size`.
    """

    top_k: int
    temperature: float
    vocab_size: int
    vocabulary: str
    kl_budget: float = 0.0

    @property
    def width(self) -> int:
        """Log-probabilities that there are of each token, at most: of the top k and the rest, or of all tokens."""
        return self.top_k + 1 if self.top_k else self.vocab_size

    @property
    def id_type(self) -> Literal["<u2", "<i4"]:
        """What ids of answers are: numbers of 2 bytes where the student's tokens all have one, else of 4."""
        return "<u2" if self.vocab_size <= 2**16 else "<i4"


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One row: its ids, the tokens of each document, and the places whose next token is asked for. All int32."""

    number: int
    ids: bytes
    lengths: tuple[int, ...]
    places: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Of each place asked for the K tokens, `id_type` [P, K], and log-probabilities, float32 [P, width]; or an `error`.

    With a budget a place has tokens as `counts` says, uint16 [P], one after another, and one log-probability more than
    tokens; `lost` is what is lost of all places together (`top_k_choice`), in nats.
    """

    number: int
    ids: bytes = b""
    log_probs: bytes = b""
    error: str = ""
    counts: bytes = b""
    lost: float = 0.0

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
