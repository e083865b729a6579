"""What travels round the ring, as msgpack with strict decoding: batches, results, the messages of an idle ring."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tllm.core.errors import UNREADABLE, FrameError
from tllm.spec.request import TokenLogprobs

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one token is chosen, as `SamplingParams` says, with all that the choice depends on.

    `banned` ids cannot be chosen now (ends of a sequence that is still too short). `history` is prompt and output, of
    which the first `prompt_length` are prompt; sent only where penalties read it.
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

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        return self == PLAIN


PLAIN = Sampling()


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Tokens [start, start + count) of the sequence `key`, whose cache lies in the pages of `table`: (first, how many).

    `sampling` is there when the token after them is to be chosen. The last `drafted` of them may be wrong: what comes
    in place of each is chosen too. `targets` are the prompt tokens after each of the first rows, when their
    log-probabilities (and of the `prompt_top` likeliest) are asked for.
    """

    key: Count
    start: Count
    count: Count
    prompt_length: Count
    table: tuple[tuple[Count, Count], ...]
    sampling: Sampling | None = None
    targets: tuple[Count, ...] = ()
    prompt_top: Count = 0
    drafted: Count = 0

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def chosen(self) -> int:
        """How many tokens are to be chosen."""
        return 0 if self.sampling is None else 1 + self.drafted


class Batch(msgspec.Struct, frozen=True, tag="batch", forbid_unknown_fields=True):
    """One step of one replica. `token_ids` of all entries in order, read by the first stage."""

    number: Count
    entries: tuple[Entry, ...]
    token_ids: tuple[Count, ...]


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="results", forbid_unknown_fields=True):
    """What the last stage sends to the first: the tokens that each entry wants chosen, in order.

    `logprobs` is parallel to `token_ids`, or empty where no entry asked. `prompt_logprobs` holds a list for each entry
    with targets, in order.
    """

    number: Count
    token_ids: tuple[Count, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


class RingHeartbeat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """Goes round an idle ring, so that every wait can have a deadline."""


class StopRing(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """The last message of a ring."""


Message = Batch | Results | RingHeartbeat | StopRing

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Read what came by a link: of the right types, but not yet checked against what this rank holds."""
    try:
        return _decoder.decode(payload)
    except UNREADABLE as error:
        # The latter two for a name that is no UTF-8 and for what is nested too deep; msgspec does not wrap them.
        raise FrameError(f"{len(payload)} bytes came that are no message of the ring: {error}") from error
