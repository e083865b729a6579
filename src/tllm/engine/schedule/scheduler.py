"""Makes the entries of a batch from sequences.

Refuses requests that can never be served, before they take a place.

Decides what each batch computes: plain Python over sequences and pages, first come first served.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec

from tllm.core.errors import RequestError
from tllm.engine.schedule.batch import PLAIN, Batch, Entry, Results, Sampling
from tllm.engine.schedule.limits import MAX_BANNED, MAX_LOGPROBS, Limits, sampling_faults
from tllm.engine.schedule.ngram_draft import num_accepted
from tllm.engine.schedule.page_pool import PagePool, Run
from tllm.engine.schedule.sequence import Sequence, SequenceState
from tllm.engine.schedule.speculation import Speculation
from tllm.spec.request import FinishReason, Output, Request, TokenLogprobs


def entry_of(
    sequence: Sequence, start: int, count: int, table: tuple[Run, ...], eos_ids: tuple[int, ...], drafted: int = 0
) -> Entry:
    """What the stages need to compute tokens [start, start + count) of a sequence, and so many drafted ones after."""
    stop = start + count
    targets: tuple[int, ...] = ()
    if sequence.wants_prompt_logprobs:
        targets = tuple(sequence.token_ids[start + 1 : min(stop + 1, sequence.prompt_length)])
    return Entry(
        key=sequence.key,
        start=start,
        count=count + drafted,
        prompt_length=sequence.prompt_length,
        table=table,
        sampling=sampling_of(sequence, eos_ids) if stop == len(sequence.token_ids) else None,
        targets=targets,
        prompt_top=(sequence.params.prompt_logprobs or 0) if targets else 0,
        drafted=drafted,
    )


def sampling_of(sequence: Sequence, eos_ids: tuple[int, ...]) -> Sampling:
    """How a sequence's next token is chosen."""
    params = sequence.params
    banned = sequence.stop_ids(eos_ids) if sequence.num_output < params.min_tokens else ()
    altered = params.penalised or bool(params.logit_bias) or bool(banned)
    if params.temperature == 0 and not altered and params.logprobs is None:
        return PLAIN
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed or 0,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        banned=banned,
        history=tuple(sequence.token_ids) if params.penalised else (),
        prompt_length=sequence.prompt_length if params.penalised else 0,
        logprobs=params.logprobs,
    )


def admit(sequence: Sequence, limits: Limits, eos_ids: tuple[int, ...], known: Container[str]) -> None:
    """Raise RequestError unless every batch that this sequence can come to need passes the checks of every stage."""
    request, params = sequence.request, sequence.params
    if request.id in known:
        raise RequestError(f"a request with id {request.id!r} is already running", "give each request its own id")
    for fault in _faults(sequence, limits, eos_ids):
        raise RequestError(f"request {request.id}: {fault}")
    if sequence.prompt_length + params.max_tokens > limits.max_model_len:
        raise RequestError(
            f"{sequence.prompt_length} prompt tokens and {params.max_tokens} new ones make "
            f"{sequence.prompt_length + params.max_tokens}; the context holds {limits.max_model_len}",
            "shorten the prompt or ask for fewer tokens",
            param="max_tokens",
        )
    slots = limits.num_pages * limits.page_size
    if -(-sequence.longest // limits.page_size) > limits.num_pages:
        raise RequestError(
            f"the request needs room for {sequence.longest} tokens; the whole cache holds {slots}",
            "give the cache more memory, or ask for fewer tokens",
            param="max_tokens",
        )


def _faults(sequence: Sequence, limits: Limits, eos_ids: tuple[int, ...]) -> Iterator[str]:
    params = sequence.params
    if sequence.prompt_length == 0:
        yield "the prompt has no token"
    for token_id in sequence.token_ids:
        if not 0 <= token_id < limits.vocab_size:
            yield f"token {token_id} is not in the vocabulary of {limits.vocab_size}"
    if params.max_tokens < 1:
        yield f"max_tokens {params.max_tokens} is not 1 or more"
    if sequence.num_output >= max(1, params.max_tokens):
        yield f"{sequence.num_output} tokens are given out already, of max_tokens {params.max_tokens}"
    if params.temperature > 0 and params.seed is None:
        yield "a sampled request needs a seed"
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        yield f"seed {params.seed} has more than 64 bits"
    for name, value in (("top_k", params.top_k), ("logprobs", params.logprobs), ("min_tokens", params.min_tokens)):
        if not 0 <= (value or 0) < 2**31:
            yield f"{name} {value} is not 0 or more"
    if not 0 <= (params.prompt_logprobs or 0) <= MAX_LOGPROBS:
        yield f"prompt_logprobs {params.prompt_logprobs} is not 0 to {MAX_LOGPROBS}"
    if any(not 0 <= token_id < limits.vocab_size for token_id in (*params.stop_token_ids, *params.logit_bias)):
        yield f"a stop or biased token is not in the vocabulary of {limits.vocab_size}"
    if len(sequence.stop_ids(eos_ids)) > MAX_BANNED:
        yield f"{len(params.stop_token_ids)} stop tokens, at most {MAX_BANNED}"
    # Penalties apply from the first choice on, so one look at it shows all that a stage will check.
    yield from sampling_faults(msgspec.structs.replace(sampling_of(sequence, eos_ids), history=()), limits)


SMALLEST_CHUNK = 128
"""Prompt tokens below which a chunk wastes more in small products than the pipeline gains."""


class ScheduledChunk(NamedTuple):
    """What a batch computes of one sequence: so many of its tokens that are due, and after them drafted ones."""

    sequence: Sequence
    due: int
    drafted: list[int]


@dataclass(frozen=True)
class ScheduledStep:
    """A batch under way: what travels, and the sequences of its entries."""

    batch: Batch
    sequences: tuple[Sequence, ...]


class Scheduler:
    """Continuous batching for a ring that holds `depth` batches at once.

    Each step first gives every running sequence that lacks one token that token, and drafted ones after it where that
    pays (`Speculation`), then prompts what is left of the budget in order of arrival. With several batches in flight
    the sequences that reply are spread evenly over them and prompts are cut, so that all stages have work. A sequence
    that finds no page takes those of the youngest, which starts again later; for drafts none is set back. Pages are
    reused while batches that read them are under way: a stage computes batches in order.
    """

    def __init__(self, limits: Limits, depth: int = 1, eos_ids: tuple[int, ...] = ()) -> None:
        limits.check()
        self.limits = limits
        self.depth = depth
        self.eos_ids = eos_ids
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.running: list[Sequence] = []  # both in order of arrival, which is the order of keys
        self.waiting: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self.speculation = Speculation(most) if (most := limits.num_speculative_tokens) else None
        self.preemptions = 0
        self.in_flight = 0
        self._next_key = 0
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        return bool(self.by_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that can never be served as written."""
        sequence = Sequence(self._next_key, request)
        admit(sequence, self.limits, self.eos_ids, self.by_id)
        self._next_key += 1
        self.by_id[request.id] = sequence
        self.waiting.append(sequence)

    def cancel(self, request_id: str) -> Output | None:
        """Drop a request at once; None if it is not here, as when it has just ended."""
        sequence = self.by_id.get(request_id)
        if sequence is None:
            return None
        self._remove(sequence)
        return Output(request_id=request_id, finish_reason="cancelled")

    def schedule(self) -> ScheduledStep | None:
        """The next batch, or None if nothing can be computed before something under way comes back."""
        room, preemptions = self.limits.max_num_batched_tokens, self.preemptions
        decodes = [one for one in self._ready_decodes() if one.state is SequenceState.RUNNING and self._cover(one)]
        chunks = self._drafted(decodes, room)
        room -= sum(1 + len(one.drafted) for one in chunks)
        chunk = self._chunk_size()
        for sequence in self.running:
            if sequence.pending > 1 and room > 0:
                count = min(sequence.pending, room, chunk)
                chunks.append(ScheduledChunk(sequence, count, []))
                room, chunk = room - count, chunk - count
            if chunk <= 0:
                break
        while room > 0 and chunk > 0 and preemptions == self.preemptions and (admitted := self._admit()):
            count = min(admitted.pending, room, chunk)
            chunks.append(ScheduledChunk(admitted, count, []))
            room, chunk = room - count, chunk - count
        return self._step(chunks) if chunks else None

    def accept(self, step: ScheduledStep, results: Results) -> list[Output]:
        """Take the results of the oldest batch under way: new tokens, ends, and pages given back."""
        tokens, scores = iter(results.token_ids), iter(results.logprobs)
        prompt_scores = iter(results.prompt_logprobs)
        outputs = []
        self.in_flight -= 1
        at = 0
        for entry, sequence in zip(step.batch.entries, step.sequences, strict=True):
            at += entry.count
            came = list(islice(tokens, entry.chosen))
            came_scores = list(islice(scores, entry.chosen))
            scored = next(prompt_scores) if entry.targets else ()
            # What follows a token that was drafted wrongly was chosen for another text; its row is computed anew.
            refuted = entry.drafted - num_accepted(step.batch.token_ids[at - entry.drafted : at], came)
            sequence.in_flight -= 1
            if sequence.state is SequenceState.DONE:
                continue
            if sequence.state is SequenceState.RUNNING:
                sequence.computed = entry.stop - refuted
                sequence.scheduled -= refuted
            if entry.targets:
                sequence.prompt_logprobs[entry.start + 1 : entry.start + 1 + len(scored)] = scored
            if came:
                given = came[: len(came) - refuted]
                if self.speculation is not None:
                    self.speculation.heard(sequence, entry.drafted, given)
                outputs.append(self._append(sequence, given, came_scores))
        return outputs

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "kv_usage": 1 - self.pool.num_free / self.pool.num_pages,
            "preemptions": self.preemptions,
            **(self.speculation.stats() if self.speculation else {}),
        }

    def _ready_decodes(self) -> list[Sequence]:
        """The oldest sequences that lack one token: an even part of those there are, and of those that are ready."""
        decodes = [sequence for sequence in self.running if sequence.pending <= 1]
        ready = [sequence for sequence in decodes if sequence.pending == 1]
        free_places = max(1, self.depth - self.in_flight)
        return ready[: min(-(-len(decodes) // self.depth), -(-len(ready) // free_places))]

    def _drafted(self, decodes: list[Sequence], room: int) -> list[ScheduledChunk]:
        """A token of each, and drafted ones after it where that pays and pages are free for them."""
        if self.speculation is None:
            return [ScheduledChunk(sequence, 1, []) for sequence in decodes]
        chunks = []
        for sequence, told in zip(decodes, self.speculation.choose(decodes, room), strict=True):
            tokens = sequence.scheduled + 1 + len(told)
            has_room = self.pool.cover(sequence.key, tokens, sequence.longest)
            chunks.append(ScheduledChunk(sequence, 1, told if has_room else []))
        return chunks

    def _chunk_size(self) -> int:
        """Prompt tokens for one batch: all that fit, or with several stages so few that each stage gets a part."""
        if self.depth == 1:
            return self.limits.max_num_batched_tokens
        free_places = max(0, self.limits.max_num_seqs - len(self.running))
        backlog = sum(len(s.token_ids) for s in self.waiting[:free_places])
        backlog += sum(len(s.token_ids) - s.computed for s in self.running if s.pending > 1)
        return max(SMALLEST_CHUNK, -(-backlog // (2 * self.depth)))

    def _admit(self) -> Sequence | None:
        """Start the oldest waiting sequence, if there are a place and pages for all that it has."""
        if not self.waiting or len(self.running) >= self.limits.max_num_seqs:
            return None
        sequence = self.waiting[0]
        # One that was preempted waits for what it has under way, whose token it may need.
        if sequence.in_flight or not self.pool.cover(sequence.key, len(sequence.token_ids), sequence.longest):
            return None
        self.waiting.pop(0)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda s: s.key)
        return sequence

    def _cover(self, sequence: Sequence) -> bool:
        """Find a page for the next token, preempting the youngest as often as need be; False if that was itself."""
        while not self.pool.cover(sequence.key, sequence.scheduled + 1, sequence.longest):
            youngest = self.running.pop()
            self.pool.release(youngest.key)
            youngest.restart()
            insort(self.waiting, youngest, key=lambda s: s.key)
            self.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _step(self, chunks: list[ScheduledChunk]) -> ScheduledStep:
        entries = []
        token_ids: list[int] = []
        for sequence, due, drafted in chunks:
            start, table = sequence.scheduled, self.pool.table(sequence.key)
            entries.append(entry_of(sequence, start, due, table, self.eos_ids, len(drafted)))
            token_ids += sequence.token_ids[start : start + due] + drafted
            sequence.scheduled += due + len(drafted)
            sequence.in_flight += 1
        batch = Batch(self._next_number, tuple(entries), tuple(token_ids))
        self.in_flight += 1
        self._next_number = (self._next_number + 1) % 2**31
        return ScheduledStep(batch, tuple(chunk.sequence for chunk in chunks))

    def _append(self, sequence: Sequence, came: list[int], scores: list[TokenLogprobs | None]) -> Output:
        """Give out the tokens that came, up to one that ends the sequence."""
        prompt: tuple[TokenLogprobs | None, ...] = ()
        if sequence.wants_prompt_logprobs:
            prompt, sequence.wants_prompt_logprobs = tuple(sequence.prompt_logprobs), False
        reason: FinishReason | None = None
        before = sequence.num_output
        for token_id in came:
            reason = sequence.append(token_id, self.eos_ids)
            if reason is not None:
                self._remove(sequence)
                break
        count = sequence.num_output - before
        return Output(
            request_id=sequence.request.id,
            token_ids=tuple(came[:count]),
            logprobs=tuple(score for score in scores[:count] if score is not None),
            prompt_logprobs=prompt,
            finish_reason=reason,
        )

    def _remove(self, sequence: Sequence) -> None:
        (self.running if sequence.state is SequenceState.RUNNING else self.waiting).remove(sequence)
        self.pool.release(sequence.key)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        sequence.state = SequenceState.DONE
        del self.by_id[sequence.request.id]
