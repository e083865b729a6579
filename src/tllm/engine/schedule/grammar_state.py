"""`GrammarState`: where a sequence is in the grammar of its reply, on the first rank. Plain Python, no torch.

The first rank knows every token of a sequence before it schedules the next one, so it alone follows the grammar. What
travels to the rank that samples is, for each token that is wanted, the set of allowed tokens (`pack_mask`), or nothing
where the grammar leaves it free. So no other rank has a state that could differ after a preemption, a wrong draft or
the loss of a node.

Where only one text can follow, its tokens are drafted (`with_grammars`) and come in the same turn of the ring. Like any
draft they count only where they are what is sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from tllm.core.errors import FrameError, RequestError
from tllm.engine.schedule.limits import Limits
from tllm.spec.request import Request
from tllm.text.grammar import GrammarCompiler, GrammarMatcher


class GrammarState:
    """The grammar of one reply. `fault` says why it cannot go on, if something went wrong inside.

    `any_token` are all tokens that text can have: where these are allowed, nothing is held.
    """

    def __init__(self, matcher: GrammarMatcher, vocab_size: int, eos_ids: tuple[int, ...], any_token: int) -> None:
        self._matcher, self._any_token = matcher, any_token
        self._num_bytes = -(-vocab_size // 8)
        self._ends = _bits(eos_ids)

    @property
    def fault(self) -> str:
        return self._matcher.fault

    def advance(self, token_id: int) -> bool:
        """Take the next token of the reply. Whether the reply ends with it: nothing can follow but an end token."""
        return (
            not self._matcher.consume(token_id) or self._matcher.is_ended or not self._matcher.allowed() & ~self._ends
        )

    def masks(self, draft_tokens: Sequence[int], unwanted: Sequence[int], ignore_eos: bool) -> tuple[bytes, ...]:
        """What may be sampled in place of each of these draft tokens, and after them, packed; empty for any token.

        `unwanted` are tokens that may not come now, and the model's end tokens with `ignore_eos`; where the grammar
        allows no other, it has its way.
        """
        masks, avoided = list[bytes](), _bits(unwanted) | (self._ends if ignore_eos else 0)
        for place in range(1 + len(draft_tokens)):
            allowed = self._matcher.allowed() or -1  # something went wrong inside: `advance` will say so
            allowed = allowed & ~avoided or allowed
            is_free = not self._any_token & ~allowed
            masks.append(b"" if is_free else pack_mask(allowed, self._num_bytes))
            if place < len(draft_tokens):
                self._matcher.consume(draft_tokens[place])
        self._matcher.roll_back(len(draft_tokens))
        return tuple(masks)

    def draft(self, proposed: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens to draft: those that are sure to come, else of what was `proposed` all that is allowed.

        A token that ends the reply is not drafted: it is sampled after the others, in the same step.
        """
        wanted = (self._matcher.forced() or list(proposed))[: max(0, most)]
        count, ended = self._matcher.count_allowed(wanted), False
        for taken in range(count):
            self._matcher.consume(wanted[taken])
            ended = self._matcher.is_ended
        self._matcher.roll_back(count)
        return wanted[: count - ended]


def begin_grammar(compiler: GrammarCompiler, request: Request) -> GrammarState | None:
    """The state of a request after the tokens that it got already; None where it has no grammar.

    RequestError where the grammar cannot be followed, or these tokens do not follow it.
    """
    if request.params.grammar is None:
        return None
    matcher = compiler.matcher(request.params.grammar)
    state = GrammarState(matcher, compiler.vocab_size, compiler.eos_ids, compiler.any_token)
    for token_id in request.output_ids:
        state.advance(token_id)
    if state.fault:
        raise RequestError(f"the grammar cannot be followed: {state.fault}", "correct or simplify it")
    return state


class HeldSequence(Protocol):
    """What is read of a sequence to draft for it."""

    grammar: GrammarState | None

    @property
    def max_draft_tokens(self) -> int: ...


def with_grammars(sequences: Sequence[HeldSequence], proposed: Sequence[list[int]], limits: Limits) -> list[list[int]]:
    """The draft tokens of each sequence, those that its grammar forces in place of the others, within the batch."""
    drafts = list(proposed)
    room = limits.max_num_batched_tokens - sum(1 + len(draft) for draft in drafts)
    for place, sequence in enumerate(sequences):
        if sequence.grammar is not None:
            had = len(drafts[place])
            most = min(sequence.max_draft_tokens, limits.max_draft_tokens, had + room)
            drafts[place] = sequence.grammar.draft(drafts[place], most)
            room += had - len(drafts[place])
    return drafts


def pack_mask(allowed: int, num_bytes: int) -> bytes:
    """A set of tokens as it travels: deflated bits, the first token in the lowest bit of the first byte.

    A set of one token takes 18 bytes of 2,048 tokens and 113 of 152,064; at the most, a set takes a bit for each token.
    """
    return zlib.compress((allowed & ((1 << 8 * num_bytes) - 1)).to_bytes(num_bytes, "little"), 1)


def unpack_mask(mask: bytes, vocab_size: int) -> bytes:
    """The bits of a set of tokens. FrameError where they are not those of this vocabulary, or allow no token."""
    wanted = -(-vocab_size // 8)
    inflate = zlib.decompressobj()
    try:
        bits = inflate.decompress(mask, wanted + 1)
    except zlib.error as error:
        raise FrameError(f"a mask of {len(mask)} bytes cannot be read: {error}") from error
    if len(bits) != wanted or not inflate.eof:
        raise FrameError(f"a mask of {len(bits)} bytes came, {wanted} are those of {vocab_size} tokens")
    if not int.from_bytes(bits, "little") & ((1 << vocab_size) - 1):
        raise FrameError(f"a mask came that allows none of {vocab_size} tokens")
    return bits


def _bits(token_ids: Sequence[int]) -> int:
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return bits
