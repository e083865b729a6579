"""`Scheduler`: decides which tokens of which sequences the next batch computes. Plain Python, no torch.

A request becomes a `Sequence`, which waits until there is a place and pages of the KV cache for it, and then runs.
There is no prefill or decode phase (continuous batching): a sequence has tokens and computed tokens and must catch up.
`schedule` makes a batch, `accept` takes its results and gives out the new tokens.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tllm.engine.schedule.batch import Batch, BatchEntry, Results
from tllm.engine.schedule.grammar_state import begin_grammar, with_grammars
from tllm.engine.schedule.limits import Limits, check_request
from tllm.engine.schedule.proposer import Proposer, num_accepted_tokens
from tllm.engine.schedule.sequence import Sequence, SequenceState
from tllm.engine.schedule.sequence_pages import SequencePages
from tllm.engine.schedule.speculative_decoding import Speculation
from tllm.engine.waiting.waiting_queue import WaitingQueue
from tllm.spec.request import FinishReason, Output, Request, TokenLogprobs
from tllm.text.grammar import GrammarCompiler

SMALLEST_CHUNK = 128
"""Prompt tokens below which a chunk wastes more in small products than the pipeline gains."""


class ScheduledChunk(NamedTuple):
    """What a batch computes of one sequence: its next `num_tokens` tokens, and draft tokens after them."""

    sequence: Sequence
    num_tokens: int
    draft_tokens: list[int]


@dataclass(frozen=True)
class ScheduledStep:
    """A batch under way: what travels, the sequences of its entries, and what a draft model took for it.

    `sources`: where it was made by `step_after`, the place of each of its sequences in the batch before.
    """

    batch: Batch
    sequences: tuple[Sequence, ...]
    draft_seconds: float = 0.0
    sources: tuple[int, ...] = ()


class Scheduler:
    """Continuous batching for a ring that holds `depth` batches at once; `WaitingQueue` says who begins next.

    Each batch first gives every running sequence that lacks one token that token, with draft tokens after it where
    that pays (`Speculation`); then prompts fill what is left of the token budget, first those that have begun, and cut
    where they do not fit (chunked prefill). With several batches in flight the sequences that reply are spread evenly
    over them and prompts are cut smaller, so that all stages have work.

    A sequence that finds no page preempts the least urgent, which lets go of its pages and starts again later. For
    draft tokens no sequence is preempted. Pages are reused while batches that read them are under way: a stage computes
    batches in order. A sequence begins after its first full pages that are in the cache from others, or from itself.
    """

    def __init__(
        self,
        limits: Limits,
        depth: int = 1,
        eos_ids: tuple[int, ...] = (),
        draft_model: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits.check()
        self.limits = limits
        self.depth = depth
        self.grammars = GrammarCompiler(limits.vocab_size, tuple(i for i in eos_ids if i < limits.vocab_size))
        self.pages = SequencePages(limits)
        self.running: list[Sequence] = []  # in order of arrival, which is the order of keys
        self.waiting = WaitingQueue[Sequence](clock)
        self.by_id: dict[str, Sequence] = {}
        drafted = limits.num_speculative_tokens
        self.speculation = Speculation(drafted, draft_model) if drafted else None
        self.preemptions = 0
        self.in_flight = 0
        self._next_key = 0
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.by_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that can never be served as written."""
        sequence = Sequence(self._next_key, request, self.grammars.eos_ids)
        check_request(request, sequence.stop_ids, sequence.sampling(), self.limits, self.by_id)
        sequence.grammar = begin_grammar(self.grammars, request)
        self._next_key += 1
        self.by_id[request.id] = sequence
        self.waiting.add(sequence)

    def cancel(self, request_id: str) -> Output | None:
        """Drop a request at once; None if it is not here, as when it has just ended."""
        if (sequence := self.by_id.get(request_id)) is None:
            return None
        self._remove(sequence)
        return Output(request_id=request_id, finish_reason="cancelled")

    def expire(self) -> list[Output]:
        """Drop requests that have waited for as long as they may."""
        expired = self.waiting.expired()
        for sequence in expired:
            self._remove(sequence)
        return [Output(request_id=sequence.request.id, finish_reason="expired") for sequence in expired]

    def schedule(self) -> ScheduledStep | None:
        """The next batch, or None if nothing can be computed before something under way comes back."""
        preemptions = self.preemptions
        ready = sorted(self._ready_decodes(), key=self.waiting.preempted_after)
        # Each may preempt those after it, so whether a sequence still runs is asked only when its turn has come.
        decodes = [one for one in ready if one.state is SequenceState.RUNNING and self._cover_next_token(one)]
        chunks = self._with_draft_tokens(decodes)
        room = self.limits.max_num_batched_tokens - sum(1 + len(chunk.draft_tokens) for chunk in chunks)
        room = min(room, self._prompt_tokens_for_batch())
        for sequence in self.running:
            if sequence.pending > 1 and room > 0:
                chunks.append(self._prompt_chunk(sequence, room))
                room -= sequence.pending
        while room > 0 and preemptions == self.preemptions and (admitted := self._admit(room)):
            chunks.append(self._prompt_chunk(admitted, room))
            room -= admitted.pending
        return self.make_step(chunks) if chunks else None

    def accept(self, step: ScheduledStep, results: Results) -> list[Output]:
        """Take the results of the oldest batch under way: new tokens, ends, and pages given back."""
        prompt_logprobs, pooled = iter(results.prompt_logprobs), iter(results.pooled)
        outputs = []
        self.in_flight -= 1
        stop = last = 0  # of the entry's tokens in the batch, and of those that were sampled for it
        for entry, sequence in zip(step.batch.entries, step.sequences, strict=True):
            stop, first, last = stop + entry.count, last, last + entry.num_sampled
            sampled, sampled_logprobs = results.token_ids[first:last], results.logprobs[first:last]
            of_prompt = next(prompt_logprobs) if entry.targets else ()
            values = next(pooled) if entry.pooling else ()
            # What follows a wrong draft token was sampled for another text; its row is computed anew.
            num_rejected = entry.num_draft_tokens
            if num_rejected:
                num_rejected -= num_accepted_tokens(step.batch.token_ids[stop - num_rejected : stop], sampled)
            sequence.in_flight -= 1
            if sequence.state is SequenceState.DONE:
                continue
            if sequence.state is SequenceState.RUNNING:
                sequence.computed = entry.stop - num_rejected
                sequence.scheduled -= num_rejected
                if entry.pooling and (whole := sequence.prompt.pool(entry, values)) is not None:
                    outputs.append(self._end_pooled(sequence, whole))
            if entry.targets:
                assert sequence.prompt.logprobs is not None, "targets are sent until they are given out"
                sequence.prompt.logprobs[entry.start + 1 : entry.start + 1 + len(of_prompt)] = of_prompt
            if sampled:
                accepted = sampled[: len(sampled) - num_rejected]
                if self.speculation is not None:
                    self.speculation.record_acceptance(sequence.key, entry.num_draft_tokens, accepted)
                outputs.append(self._give_out(sequence, accepted, sampled_logprobs))
        return outputs

    def stats(self) -> dict[str, float]:
        """Numbers of this moment, and totals since the start."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "preemptions": self.preemptions,
            **self.pages.stats(),
            **(self.speculation.stats() if self.speculation else {}),
        }

    def _ready_decodes(self) -> list[Sequence]:
        """The oldest sequences that lack one token: an even part of those there are, and of those that are ready."""
        decodes = [sequence for sequence in self.running if sequence.pending <= 1]
        ready = [sequence for sequence in decodes if sequence.pending == 1]
        free_places = max(1, self.depth - self.in_flight)
        return ready[: min(-(-len(decodes) // self.depth), -(-len(ready) // free_places))]

    def _with_draft_tokens(self, decodes: list[Sequence]) -> list[ScheduledChunk]:
        """A token of each, and draft tokens after it where that pays and pages are free for them."""
        proposed: list[list[int]] = [[] for _ in decodes]
        if self.speculation is not None:
            proposed = self.speculation.propose(decodes, self.limits.max_num_batched_tokens)
        chunks = []
        for sequence, draft_tokens in zip(decodes, with_grammars(decodes, proposed, self.limits), strict=True):
            # Of its next token each is sure.
            if draft_tokens and not self.pages.cover(sequence, sequence.scheduled + 1 + len(draft_tokens)):
                draft_tokens = []
            chunks.append(ScheduledChunk(sequence, 1, draft_tokens))
        return chunks

    def _prompt_tokens_for_batch(self) -> int:
        """Prompt tokens for one batch: all that fit, or with several stages so few that each stage gets a part."""
        if self.depth == 1 or self.limits.is_bidirectional:
            return self.limits.max_num_batched_tokens
        free_places = max(0, self.limits.max_num_seqs - len(self.running))
        backlog = sum(len(sequence.token_ids) for sequence in islice(self.waiting, free_places))
        backlog += sum(len(one.token_ids) - one.computed for one in self.running if one.pending > 1)
        return max(SMALLEST_CHUNK, -(-backlog // (2 * self.depth)))

    def _prompt_chunk(self, sequence: Sequence, room: int) -> ScheduledChunk:
        """The next tokens of a prompt, as many as there is room for; a chunk that is cut ends where a page does.

        A small one does not: it would lose too many of its tokens. The pages that it fills are found from now on, even
        by sequences of the same batch, as the other choices of a request are: a layer writes all keys and values of a
        batch before it reads any.
        """
        count = min(sequence.pending, room)
        beyond = (sequence.scheduled + count) % self.limits.page_size
        if count < sequence.pending and count - beyond >= SMALLEST_CHUNK:
            count -= beyond
        self.pages.add_full(sequence, count)
        return ScheduledChunk(sequence, count, [])

    def next_to_begin(self) -> Sequence | None:
        """The waiting sequence whose turn it is, if there is a place; one begins once there are pages for it.

        Those whose pages are on their way from disk are passed over.
        """
        if len(self.running) >= self.limits.max_num_seqs:
            return None
        sequence = next((one for one in self.waiting if not self.pages.is_awaited(one)), None)
        # One that was preempted waits for what it has under way, whose token it may need.
        return None if sequence is None or sequence.in_flight else sequence

    def _admit(self, room: int) -> Sequence | None:
        """Start the sequence whose turn it is, if there are room in the batch and pages for all that it has."""
        sequence = self.next_to_begin()
        if not (sequence and self.limits.may_begin(sequence.pending, room) and self.pages.begin(sequence)):
            return None
        self.waiting.begin(sequence, sequence.pending)
        insort(self.running, sequence, key=lambda other: other.key)
        return sequence

    def _cover_next_token(self, sequence: Sequence) -> bool:
        """Find a page for the next token, preempting others as often as need be; False if that was itself."""
        while not self.pages.cover(sequence, sequence.scheduled + 1):
            preempted = self.waiting.preempt(self.running)
            self.pages.release(preempted)
            preempted.restart()
            if self.speculation is not None:
                self.speculation.preempted(preempted.key)
            self.waiting.put_back(preempted)
            self.preemptions += 1
            if preempted is sequence:
                return False
        return True

    def make_step(self, chunks: list[ScheduledChunk], sources: tuple[int, ...] = ()) -> ScheduledStep:
        """The batch of these chunks. Their tokens count as scheduled from now on, and their full pages as written.

        A zero stands for a token that is not known yet: it comes from that place of `sources` in the batch before.
        """
        entries, token_ids = list[BatchEntry](), list[int]()
        for sequence, count, draft_tokens in chunks:
            start = sequence.scheduled
            entries.append(sequence.batch_entry(count, self.pages.table(sequence), draft_tokens))
            token_ids += (sequence.token_ids[start : start + count] or [0]) + draft_tokens
            sequence.scheduled += count + len(draft_tokens)
            sequence.in_flight += 1
            self.pages.add_full(sequence)
        batch = Batch(self._next_number, tuple(entries), tuple(token_ids))
        self.in_flight += 1
        self._next_number = (self._next_number + 1) % 2**31
        drafting = self.speculation.draft_seconds if self.speculation else 0.0
        return ScheduledStep(batch, tuple(chunk.sequence for chunk in chunks), drafting, sources)

    def _give_out(
        self, sequence: Sequence, accepted: tuple[int, ...], logprobs: tuple[TokenLogprobs | None, ...]
    ) -> Output:
        """Add the new tokens to a sequence, up to one that ends it."""
        prompt, sequence.prompt.logprobs = tuple(sequence.prompt.logprobs or ()), None
        reason: FinishReason | None = None
        before = sequence.num_output
        for token_id in accepted:
            reason = sequence.fail() if token_id == self.limits.vocab_size else sequence.append(token_id)
            if reason is not None:
                self._remove(sequence)
                break
        count = sequence.num_output - before
        self.waiting.count_output(sequence, count)
        return Output(
            request_id=sequence.request.id,
            token_ids=accepted[:count],
            logprobs=tuple([score for score in logprobs[:count] if score is not None]),
            prompt_logprobs=prompt,
            cached_tokens=0 if before else sequence.prefix.found or 0,
            finish_reason=reason,
            error=sequence.fault if reason == "error" else "",
            is_non_finite=sequence.prefix.is_doubtful,
        )

    def _end_pooled(self, sequence: Sequence, values: tuple[float, ...]) -> Output:
        """A prompt that is pooled has come to these values, and to its end."""
        reason = sequence.end_pooled(values)
        self._remove(sequence)
        request_id, found = sequence.request.id, sequence.prefix.found or 0
        if reason == "error":
            return Output(request_id=request_id, finish_reason=reason, error=sequence.fault, is_non_finite=True)
        return Output(request_id=request_id, pooled=values, cached_tokens=found, finish_reason=reason)

    def _remove(self, sequence: Sequence) -> None:
        """A sequence has ended: it lets go of its pages."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.pages.release(sequence)
        else:
            self.waiting.remove(sequence)
            self.pages.drop(sequence)
        self.waiting.forget(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence.key)
        sequence.state = SequenceState.DONE
        del self.by_id[sequence.request.id]
