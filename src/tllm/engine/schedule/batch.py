"""The messages that go round the ring of stages: batches, their results, pages on disk, adapters that are let go,
heartbeats and the stop.

They travel as msgpack and are decoded strictly: an unknown field or a wrong type is a `FrameError`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tllm.core.errors import decoded
from tllm.engine.pages.page_messages import PageMessage
from tllm.spec.request import PoolingParams, TokenLogprobs, TraceNumber

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
AdapterId = Annotated[str, msgspec.Meta(max_length=64)]
WIRE_KEYS = {"page_table": "table", "num_draft_tokens": "drafted"}  # shorter on the wire, once for every sequence


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next token of one sequence is sampled: its `SamplingParams`, and the tokens that they refer to.

    `banned` are ids that may not be sampled now: those that end the sequence, while it is shorter than `min_tokens`.
    `history` is the prompt and the output so far, and its first `prompt_length` ids are the prompt. Both are sent only
    where a penalty reads them. `mask` are the tokens that a grammar allows (`grammar_state.pack_mask`), where there
    is one; it comes from the entry, which has one for each of its tokens.
    """

    temperature: float = 0.0
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Count, float] = {}
    banned: tuple[Count, ...] = ()
    history: tuple[Count, ...] = ()
    prompt_length: Count = 0
    logprobs: Count | None = None
    tempered_logprobs: bool = False
    mask: bytes = b""

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the most likely token is all that is asked for: no penalty, ban, grammar or log-probability."""
        return self == PLAIN_GREEDY


PLAIN_GREEDY = Sampling()


class BatchEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename=WIRE_KEYS):
    """One sequence's part of a batch: its tokens at the positions [start, start + count).

    `key` is the number by which the engine knows the sequence. `page_table` lists the pages of the KV cache that hold
    the sequence, in order, as runs (first page, number of pages). In `state_slot` are its states in layers with those.

    `sampling` is there when a token is to be sampled after the last one of these. The last `num_draft_tokens` of them
    are draft tokens of speculative decoding, which may be wrong; a token is sampled in place of each of them, too.
    Under a grammar `masks` has the tokens that are allowed for each that is sampled, and nothing where all are.

    With `pooling` these tokens come to numbers instead (`Results.pooled`): all of them, or the last alone.

    `targets` are the prompt tokens that follow each of the first rows, where the request wants the log-probabilities
    of its prompt, each with those of the `prompt_top` likeliest tokens.

    `lora` is the id of the adapter that its rows are computed with, "" for none. Ranks tell what they do for a `trace`.
    """

    key: Annotated[int, msgspec.Meta(ge=0)]
    start: Count
    count: Count
    prompt_length: Count
    page_table: tuple[tuple[Count, Count], ...]
    sampling: Sampling | None = None
    targets: tuple[Count, ...] = ()
    prompt_top: Count = 0
    num_draft_tokens: Count = 0
    state_slot: Count = 0
    masks: tuple[bytes, ...] = ()
    lora: AdapterId = ""
    pooling: PoolingParams | None = None
    trace: TraceNumber = 0

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + self.count

    @property
    def num_sampled(self) -> int:
        """How many tokens are sampled from this entry's last rows."""
        return 0 if self.sampling is None else 1 + self.num_draft_tokens


class Batch(msgspec.Struct, frozen=True, tag="batch", forbid_unknown_fields=True):
    """What one step of a replica computes. `token_ids` are those of all entries, in order; the first stage embeds them.

    Every stage reads the entries: they say where keys and values lie and which rows see which.
    """

    number: Count
    entries: tuple[BatchEntry, ...]
    token_ids: tuple[Count, ...]

    @property
    def is_decode(self) -> bool:
        """Whether each of its sequences gets its next token (and maybe draft tokens after it); none is at its prompt.

        What such batches take is what replies cost. A prompt whose last token alone is left counts as well.
        """
        return all(entry.count == 1 + entry.num_draft_tokens for entry in self.entries)


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="results", forbid_unknown_fields=True):
    """What the last stage sends to the first: `num_sampled` tokens of each entry, in the order of the entries.

    The vocabulary's size stands for a token that could not be drawn, as logits were no finite numbers.
    `logprobs` is parallel to `token_ids`, or empty where no entry asked. `prompt_logprobs` holds a tuple for each entry
    with targets, in order, and `pooled` one for each with pooling: of "mean" the sum of its rows, as pairs of numbers
    whose sum that is, first all first ones, then all second ones.
    """

    number: Count
    token_ids: tuple[Count, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    pooled: tuple[tuple[float, ...], ...] = ()


class ForgetAdapter(msgspec.Struct, frozen=True, tag="forget", forbid_unknown_fields=True):
    """Let go of an adapter, which no later batch names; it ends at the last stage. `number` is that of its loading."""

    lora: AdapterId
    number: Count


class RingHeartbeat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """Goes round an idle ring, so that every wait can have a deadline."""


class StopRing(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """The last message of a ring: each rank passes it on and ends."""


RingMessage = Batch | Results | PageMessage | ForgetAdapter | RingHeartbeat | StopRing

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RingMessage] = msgspec.msgpack.Decoder(RingMessage)


def encode(message: RingMessage) -> bytes:
    """A message as it travels."""
    return _encoder.encode(message)


def decode(payload: bytes) -> RingMessage:
    """Read a message from a link. Its types are right; `check_batch` and `check_results` look at its values.

    Raises `FrameError` for anything else.
    """
    return decoded(payload, _decoder, f"{len(payload)} bytes came that are no message of the ring")
