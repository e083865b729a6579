"""Requests and a ring for the scheduler's tests: what stages would do to their slots, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tllm.engine.schedule.batch import Results
from tllm.engine.schedule.draft_phases import DraftPhases
from tllm.engine.schedule.limits import Limits, check_batch, check_results
from tllm.engine.schedule.scheduler import ScheduledStep, Scheduler
from tllm.engine.schedule.step_cost import StepCost
from tllm.spec.request import Output, Request, SamplingParams, TokenLogprobs

VOCAB = 50


def limits(**more: int) -> Limits:
    sizes = dict(
        num_pages=16, vocab_size=VOCAB, max_model_len=60, page_size=4, max_num_seqs=4, max_num_batched_tokens=16
    )
    return Limits(**{**sizes, **more})


def request(name: str, prompt: list[int] | int, max_tokens: int = 4, **params: object) -> Request:
    ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    given = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(id=name, prompt_ids=tuple(ids), params=SamplingParams(max_tokens=max_tokens, **given))  # type: ignore[arg-type]


def continuation(token_ids: list[int]) -> int:
    """The fake model: the next token follows from every token before it."""
    return (sum((i + 1) * t for i, t in enumerate(token_ids)) * 7 + len(token_ids)) % VOCAB


def repeating(token_ids: list[int]) -> int:
    """Another one, that often says what can be drafted: what came three tokens before, but for every fifth place."""
    return continuation(token_ids) if len(token_ids) % 5 == 0 else token_ids[max(0, len(token_ids) - 3)]


class FreeRows(StepCost):
    """Steps that take no longer for one more row, whatever a clock says: every draft token is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.row_seconds = 0.0

    def record(self, rows: int, seconds: float, has_drafts: bool) -> None:
        pass


class EveryDraft(FreeRows):
    """The same, and a step takes so long that every step of a draft model pays."""

    def seconds(self, rows: float) -> float:
        return 1000.0


class AlwaysDrafting(DraftPhases):
    """The draft model is asked in every step."""

    def begin_step(self, sequences: int, now: float) -> bool:
        return True


class FakeRing:
    """Computes batches in order, as stages do, on slots that remember all that their keys and values follow from.

    These are the tokens up to the slot's own one, and the salt of the sequence that wrote it. Reading a slot that holds
    anything else than what the sequence itself would have written fails. So pages that are reused too early, or shared
    wrongly, are seen. All of a batch is written before anything is read. Results wait until they are taken.
    The fake model's hidden state of a token is its id.
    """

    def __init__(self, scheduler: Scheduler, model: Callable[[list[int]], int] = continuation) -> None:
        self.scheduler, self.model = scheduler, model
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.in_flight: deque[tuple[ScheduledStep, Results]] = deque()
        self.sizes: list[list[int]] = []

    def start(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        check_batch(step.batch, self.scheduler.limits)
        self.sizes.append([entry.count for entry in step.batch.entries])
        self.in_flight.append((step, self._compute(step)))
        return True

    def finish(self) -> list[Output]:
        step, results = self.in_flight.popleft()
        check_results(results, step.batch, self.scheduler.limits)
        return self.scheduler.accept(step, results)

    def step(self) -> list[Output]:
        """One step of the driver: fill the ring, take the oldest results."""
        while len(self.in_flight) < self.scheduler.depth and self.start():
            pass
        return self.finish() if self.in_flight else []

    def run(self) -> list[Output]:
        outputs = []
        while self.scheduler.has_work or self.in_flight:
            outputs += self.step()
        return outputs

    def _compute(self, step: ScheduledStep) -> Results:
        page_size, at = self.scheduler.limits.page_size, 0
        tokens, prompts, pooled, texts = [], [], [], []
        for entry, sequence in zip(step.batch.entries, step.sequences, strict=True):
            known = [*sequence.token_ids[: entry.start], *step.batch.token_ids[at : at + entry.count]]
            at += entry.count
            pages = [first + i for first, count in entry.page_table for i in range(count)]
            slots = [pages[p // page_size] * page_size + p % page_size for p in range(entry.stop)]
            own = [(sequence.request.cache_salt, tuple(known[: p + 1])) for p in range(entry.stop)]
            self.slots.update(zip(slots[entry.start :], own[entry.start :], strict=True))
            texts.append((entry, known, slots, own))
        for entry, known, slots, own in texts:
            assert [self.slots[slot] for slot in slots] == own
            if entry.targets:
                top = ((0, -1.0),) * entry.prompt_top
                prompts.append(
                    tuple(TokenLogprobs(t, -float(entry.start + i), top) for i, t in enumerate(entry.targets))
                )
            if entry.pooling is not None:
                pooled.append((float(sum(known[entry.start : entry.stop])), 0.0))
            tokens += [self.model(known[: entry.stop - i]) for i in reversed(range(entry.num_sampled))]
        return Results(
            number=step.batch.number,
            token_ids=tuple(tokens),
            prompt_logprobs=tuple(prompts),
            pooled=tuple(pooled),
        )


def expected(
    asked: Request, eos_ids: tuple[int, ...] = (), model: Callable[[list[int]], int] = continuation
) -> tuple[list[int], str]:
    """What a request must give, one token after another."""
    ids, out = list(asked.prompt_ids), []
    stops = asked.params.stop_token_ids + (() if asked.params.ignore_eos else eos_ids)
    while True:
        out.append(model(ids))
        ids.append(out[-1])
        if out[-1] in stops:
            return out, "stop"
        if len(out) == asked.params.max_tokens:
            return out, "length"
