"""Decides what each batch computes: plain Python over sequences and pages, first come first served."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tllm.engine.admission import admit
from tllm.engine.batch import Batch, Results
from tllm.engine.build import entry_of
from tllm.engine.draft import agreeing
from tllm.engine.limits import Limits
from tllm.engine.pages import PagePool
from tllm.engine.sequence import Sequence, State
from tllm.engine.speculation import Speculation
from tllm.spec.request import FinishReason, Output, Request, TokenLogprobs

SMALLEST_CHUNK = 128
"""Prompt tokens below which a chunk wastes more in small products than the pipeline gains."""


class Chunk(NamedTuple):
    """What a batch computes of one sequence: so many of its tokens that are due, and after them drafted ones."""

    sequence: Sequence
    due: int
    drafted: list[int]


@dataclass(frozen=True)
class Step:
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

    def schedule(self) -> Step | None:
        """The next batch, or None if nothing can be computed before something under way comes back."""
        room, preemptions = self.limits.max_num_batched_tokens, self.preemptions
        decodes = [one for one in self._ready_decodes() if one.state is State.RUNNING and self._cover(one)]
        chunks = self._drafted(decodes, room)
        room -= sum(1 + len(one.drafted) for one in chunks)
        chunk = self._chunk_size()
        for sequence in self.running:
            if sequence.pending > 1 and room > 0:
                count = min(sequence.pending, room, chunk)
                chunks.append(Chunk(sequence, count, []))
                room, chunk = room - count, chunk - count
            if chunk <= 0:
                break
        while room > 0 and chunk > 0 and preemptions == self.preemptions and (admitted := self._admit()):
            count = min(admitted.pending, room, chunk)
            chunks.append(Chunk(admitted, count, []))
            room, chunk = room - count, chunk - count
        return self._step(chunks) if chunks else None

    def accept(self, step: Step, results: Results) -> list[Output]:
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
            refuted = entry.drafted - agreeing(step.batch.token_ids[at - entry.drafted : at], came)
            sequence.in_flight -= 1
            if sequence.state is State.DONE:
                continue
            if sequence.state is State.RUNNING:
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

    def _drafted(self, decodes: list[Sequence], room: int) -> list[Chunk]:
        """A token of each, and drafted ones after it where that pays and pages are free for them."""
        if self.speculation is None:
            return [Chunk(sequence, 1, []) for sequence in decodes]
        chunks = []
        for sequence, told in zip(decodes, self.speculation.choose(decodes, room), strict=True):
            tokens = sequence.scheduled + 1 + len(told)
            has_room = self.pool.cover(sequence.key, tokens, sequence.longest)
            chunks.append(Chunk(sequence, 1, told if has_room else []))
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
        sequence.state = State.RUNNING
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

    def _step(self, chunks: list[Chunk]) -> Step:
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
        return Step(batch, tuple(chunk.sequence for chunk in chunks))

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
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        self.pool.release(sequence.key)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        sequence.state = State.DONE
        del self.by_id[sequence.request.id]
