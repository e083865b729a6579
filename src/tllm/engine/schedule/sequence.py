"""A request's tokens inside the engine: what it has, what is computed, what is under way."""

from __future__ import annotations

from enum import Enum

from tllm.spec.request import FinishReason, Request, TokenLogprobs


class SequenceState(Enum):
    """Where a sequence is: in the queue, with a place and pages, or gone."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Sequence:
    """There is no prefill or decode phase: a sequence has tokens and computed tokens, and must catch up.

    `token_ids` are prompt and output. The keys and values of the first `scheduled` are in the cache or in a batch under
    way; those of the first `computed` are in the cache of every stage. `in_flight` counts batches that hold some.
    """

    def __init__(self, key: int, request: Request) -> None:
        self.key = key
        self.request = request
        self.params = request.params
        self.prompt_length = len(request.prompt_ids)
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.computed = 0
        self.scheduled = 0
        self.in_flight = 0
        self.state = SequenceState.WAITING
        # Tokens already given out came with them, so a request that is resubmitted does not ask again.
        self.wants_prompt_logprobs = request.params.prompt_logprobs is not None and not request.output_ids
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]

    @property
    def pending(self) -> int:
        """Tokens that no batch holds yet."""
        return len(self.token_ids) - self.scheduled

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def longest(self) -> int:
        """The most slots it can come to need: the last token is given out and never computed."""
        return self.prompt_length + self.params.max_tokens - 1

    def stop_ids(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that end it."""
        own = self.params.stop_token_ids
        return own if self.params.ignore_eos else (*eos_ids, *own)

    def append(self, token_id: int, eos_ids: tuple[int, ...]) -> FinishReason | None:
        """Take the next token; says why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids(eos_ids) and self.num_output > self.params.min_tokens:
            return "stop"
        return "length" if self.num_output >= self.params.max_tokens else None

    def restart(self) -> None:
        """Forget what is computed: its pages go to another. Tokens under way may still arrive."""
        self.computed = self.scheduled = 0
        self.state = SequenceState.WAITING
