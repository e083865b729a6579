"""The scheduler against a ring that notices every slot read or reused wrongly."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.properties import examples
from tests.unit.engine.kits import VOCAB, FakeRing, FreeRows, continuation, expected, limits, repeating, request
from tllm.core.errors import ConfigError, RequestError
from tllm.engine.schedule.limits import MAX_BANNED
from tllm.engine.schedule.scheduler import SMALLEST_CHUNK, Scheduler
from tllm.engine.schedule.sequence import Sequence
from tllm.spec.request import Output, Request, Scheduling


def urgent(asked: Request, priority: int) -> Request:
    return msgspec.structs.replace(asked, scheduling=Scheduling(priority=priority))


def served(scheduler: Scheduler, *requests: Request) -> dict[str, tuple[list[int], str | None]]:
    ring = FakeRing(scheduler)
    for one in requests:
        scheduler.add(one)
    return gathered(ring.run())


def gathered(outputs: list[Output]) -> dict[str, tuple[list[int], str | None]]:
    found: dict[str, tuple[list[int], str | None]] = {}
    for output in outputs:
        ids, reason = found.setdefault(output.request_id, ([], None))
        assert reason is None, f"{output.request_id} goes on after its end"
        found[output.request_id] = (ids + list(output.token_ids), output.finish_reason)
    return found


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12) | st.builds(
    lambda length, end: [*range(1, length + 1), *end], st.integers(1, 10), st.lists(st.integers(0, 2), max_size=2)
)
"""Any ones, and such as begin alike."""


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submitting, cancelling and turning: every request ends as it must, and nothing leaks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Request] = {}
        self.outputs: list[Output] = []
        self.cancelled: set[str] = set()
        self.ring: FakeRing | None = None
        self.model = continuation

    @precondition(lambda self: self.ring is None)
    @rule(
        depth=st.integers(1, 4),
        pages=st.integers(6, 20),
        seqs=st.integers(1, 5),
        tokens=st.integers(6, 20),
        drafted=st.sampled_from([0, 0, 1, 4]),
        caching=st.sampled_from([True, True, False]),
    )
    def begin(self, depth: int, pages: int, seqs: int, tokens: int, drafted: int, caching: bool) -> None:
        sizes = limits(
            num_pages=pages,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=24,
            num_speculative_tokens=min(drafted, tokens - seqs),
            enable_prefix_caching=caching,
        )
        self.model = repeating if drafted else continuation
        self.ring = FakeRing(Scheduler(sizes, depth, eos_ids=(0, 1, 2)), self.model)

    @precondition(lambda self: self.ring is not None)
    @rule(
        prompt=PROMPTS,
        again=st.booleans(),
        salt=st.sampled_from(["", "", "one", "two"]),
        priority=st.sampled_from([0, 0, 1, -1]),
        max_tokens=st.integers(1, 12),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=4),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, 0, 2]),
    )
    def submit(
        self,
        prompt: list[int],
        again: bool,
        salt: str,
        priority: int,
        max_tokens: int,
        stops: set[int],
        ignore_eos: bool,
        prompt_logprobs: int | None,
    ) -> None:
        assert self.ring is not None
        name = f"r{len(self.asked)}"
        ended = [one for one in self.outputs if one.finish_reason in ("stop", "length")]
        if again and ended:  # the next turn of a chat: prompt and reply of one that has ended, and more
            earlier = self.asked[ended[-1].request_id]
            reply, _ = gathered(self.outputs)[earlier.id]
            prompt, salt = [*earlier.prompt_ids, *reply, *prompt][:12], earlier.cache_salt
        asked = request(
            name,
            prompt,
            max_tokens,
            stop_token_ids=tuple(stops),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
        )
        asked = msgspec.structs.replace(asked, cache_salt=salt, scheduling=Scheduling(priority=priority))
        self.asked[name] = asked
        self.ring.scheduler.add(asked)

    @precondition(lambda self: self.ring is not None and self.ring.scheduler.by_id)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert self.ring is not None
        name = data.draw(st.sampled_from(sorted(self.ring.scheduler.by_id)))
        output = self.ring.scheduler.cancel(name)
        assert output is not None and output.finish_reason == "cancelled"
        self.cancelled.add(name)
        self.outputs.append(output)

    @precondition(lambda self: self.ring is not None and len(self.ring.in_flight) < self.ring.scheduler.depth)
    @rule()
    def start(self) -> None:
        assert self.ring is not None
        self.ring.start()

    @precondition(lambda self: self.ring is not None and self.ring.in_flight)
    @rule()
    def finish(self) -> None:
        assert self.ring is not None
        self.outputs += self.ring.finish()

    @invariant()
    def sound(self) -> None:
        if self.ring is None:
            return
        scheduler = self.ring.scheduler
        scheduler.pages.pool.check()
        if scheduler.pages.prefix_cache is not None:
            scheduler.pages.prefix_cache.check()
        assert len(scheduler.running) <= scheduler.limits.max_num_seqs
        assert all(sum(sizes) <= scheduler.limits.max_num_batched_tokens for sizes in self.ring.sizes)
        assert set(scheduler.pages.pool._held) == {sequence.key for sequence in scheduler.running}
        for sequence in scheduler.by_id.values():
            most = len(sequence.token_ids) + scheduler.limits.num_speculative_tokens
            assert 0 <= sequence.computed <= sequence.scheduled <= most
        if scheduler.speculation is not None:
            assert set(scheduler.speculation._proposed) <= {sequence.key for sequence in scheduler.by_id.values()}

    def teardown(self) -> None:
        if self.ring is None:
            return
        self.outputs += self.ring.run()
        self.sound()
        assert self.ring.scheduler.pages.pool.num_free == self.ring.scheduler.pages.pool.num_pages, "pages leaked"
        found = gathered(self.outputs)
        assert set(found) == set(self.asked)
        for name, asked in self.asked.items():
            want = expected(asked, (0, 1, 2), self.model)
            if name in self.cancelled:
                assert found[name][1] == "cancelled"
                assert want[0][: len(found[name][0])] == found[name][0]
            else:
                assert found[name] == want
                self._prompt_logprobs_came_once(asked)

    def _prompt_logprobs_came_once(self, asked: Request) -> None:
        came = [output.prompt_logprobs for output in self.outputs if output.request_id == asked.id]
        if asked.params.prompt_logprobs is None:
            assert not any(came)
            return
        assert not any(came[1:])
        assert came[0][0] is None
        assert [one.token_id for one in came[0][1:] if one] == list(asked.prompt_ids[1:])
        assert [one.logprob for one in came[0][1:] if one] == [-float(i) for i in range(len(asked.prompt_ids) - 1)]


SchedulerMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=50)
TestScheduler = SchedulerMachine.TestCase


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=16))
    ring = FakeRing(scheduler)
    scheduler.add(request("a", 40, 3))
    ring.run()
    assert ring.sizes == [[16], [16], [8], [1], [1]]


def test_decodes_go_before_a_prompt_that_would_fill_the_batch() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=16, num_pages=32))
    ring = FakeRing(scheduler)
    scheduler.add(request("a", 4, 20))
    ring.step()
    scheduler.add(request("b", 40, 2))
    ring.step()
    assert ring.sizes[-1] == [1, 15]


def test_eight_sequences_make_two_groups_of_four_on_two_stages() -> None:
    scheduler = Scheduler(limits(num_pages=64, max_num_seqs=8, max_num_batched_tokens=64), depth=2)
    ring = FakeRing(scheduler)
    for i in range(8):
        scheduler.add(request(f"r{i}", 3, 30))
    for _ in range(12):
        ring.step()
    assert ring.sizes[-6:] == [[1] * 4] * 6


def test_nine_sequences_spread_evenly_over_four_stages() -> None:
    scheduler = Scheduler(limits(num_pages=99, max_num_seqs=9, max_num_batched_tokens=64), depth=4)
    ring = FakeRing(scheduler)
    for i in range(9):
        scheduler.add(request(f"r{i}", 3, 40))
    ring.run()
    steady = [len(sizes) for sizes in ring.sizes[20:60]]
    assert all(sorted(steady[i : i + 4]) == [2, 2, 2, 3] for i in range(0, 40, 4))


def test_one_prompt_fills_several_stages() -> None:
    sizes = limits(num_pages=600, max_num_batched_tokens=2048, max_model_len=2100)
    scheduler = Scheduler(sizes, depth=2)
    ring = FakeRing(scheduler)
    scheduler.add(request("a", [7] * 2000, 1))
    ring.step()
    assert len(ring.sizes) == 2, "the second chunk starts before the first comes back"
    ring.run()
    assert all(sum(one) <= 500 for one in ring.sizes)
    assert min(sum(one) for one in ring.sizes[:-1]) >= SMALLEST_CHUNK


def test_uneven_groups_become_even() -> None:
    scheduler = Scheduler(limits(num_pages=64, max_num_seqs=8, max_num_batched_tokens=64), depth=2)
    ring = FakeRing(scheduler)
    for i in range(8):
        scheduler.add(request(f"r{i}", 3, 12 if i in (0, 2, 4) else 40))
    outputs = ring.run()
    assert sorted(len(sizes) for sizes in ring.sizes[40:60]) == [2] * 10 + [3] * 10
    assert len(gathered(outputs)) == 8


def test_drafts_that_are_right_save_turns() -> None:
    asked = [request(f"r{i}", [10 + i, 20 + i, 30 + i] * 2, 20) for i in range(2)]
    turns, found = [], []
    for drafted in (0, 6):
        scheduler = Scheduler(limits(num_pages=32, num_speculative_tokens=drafted))
        ring = FakeRing(scheduler, repeating)
        for one in asked:
            scheduler.add(one)
        found.append(gathered(ring.run()))
        turns.append(len(ring.sizes))
    assert found[0] == found[1] == {one.id: expected(one, (), repeating) for one in asked}
    assert turns[0] == 21 - 1 and turns[1] < 0.6 * turns[0]
    stats = scheduler.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"], "every fifth place is not foretold"


@pytest.mark.parametrize("drafted", [0, 4])
def test_a_token_that_could_not_be_drawn_ends_its_sequence_alone(drafted: int) -> None:
    def overflowing(token_ids: list[int]) -> int:
        return VOCAB if len(token_ids) == 10 and token_ids[0] == 1 else repeating(token_ids)

    scheduler = Scheduler(limits(num_speculative_tokens=drafted))
    if scheduler.speculation is not None:
        scheduler.speculation.cost = FreeRows()
    ring, asked, beside = FakeRing(scheduler, overflowing), request("a", 5, 9), request("b", [2, 3, 4], 9)
    scheduler.add(asked)
    scheduler.add(beside)
    outputs = ring.run()
    assert gathered(outputs) == {
        "a": (expected(asked, model=repeating)[0][:5], "error"),
        "b": expected(beside, model=repeating),
    }
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert [("no finite numbers" in output.error, output.is_non_finite) for output in failed] == [(True, True)]
    scheduler.pages.pool.check()


def test_pages_after_which_no_token_could_be_drawn_are_computed_anew() -> None:
    scheduler, first = Scheduler(limits()), iter([VOCAB])
    ring = FakeRing(scheduler, lambda token_ids: next(first, continuation(token_ids)))
    for name, found in (("a", 0), ("b", 0), ("c", 8)):
        asked = request(name, 10, 3)
        scheduler.add(asked)
        outputs = ring.run()
        assert gathered(outputs) == {name: ([], "error") if name == "a" else expected(asked)}
        assert outputs[0].cached_tokens == found
        scheduler.pages.pool.check()
    assert scheduler.pages.prefix_cache is not None
    scheduler.pages.prefix_cache.check()


def test_for_drafts_nobody_is_set_back() -> None:
    scheduler = Scheduler(limits(num_pages=8, num_speculative_tokens=8, max_num_batched_tokens=32))
    asked = [request(f"r{i}", [1, 2, 3] * 2, 6) for i in range(2)]  # 11 tokens at the most, three pages each
    ring = FakeRing(scheduler, lambda ids: ids[-3])
    for one in asked:
        scheduler.add(one)
    ring.run()
    assert scheduler.stats()["preemptions"] == 0 and scheduler.stats()["accepted_tokens"] > 0


def test_a_stop_token_among_drafted_ones_ends_the_sequence_there() -> None:
    scheduler = Scheduler(limits(num_speculative_tokens=6))
    ring = FakeRing(scheduler, lambda ids: ids[-3])
    scheduler.add(request("r", [1, 2, 3] * 2, 10, stop_token_ids=(3,)))
    outputs = ring.run()
    assert [one.token_ids for one in outputs] == [(1,), (2, 3)] and outputs[-1].finish_reason == "stop"


def test_the_youngest_gives_way_and_comes_back() -> None:
    scheduler = Scheduler(limits(num_pages=6, max_num_seqs=3, max_model_len=24))
    requests = [request(name, 6, 16) for name in "abc"]
    found = served(scheduler, *requests)
    assert scheduler.preemptions > 0
    assert found == {one.id: expected(one) for one in requests}
    assert scheduler.pages.pool.num_free == 6


@pytest.mark.parametrize("priorities", [(0, 0, 0), (9, 0, 0), (9, 5, 7), (-1, 5, 0)])
def test_the_least_urgent_gives_way_first_and_the_youngest_of_those(
    priorities: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(limits(num_pages=6, max_num_seqs=3, max_model_len=24))
    requests = [urgent(request(name, 6, 16), priority) for name, priority in zip("abc", priorities, strict=True)]
    gave_way, preempt = list[str](), scheduler.waiting.preempt

    def noting(running: list[Sequence]) -> Sequence:
        gave_way.append(preempt(running).request.id)
        return scheduler.by_id[gave_way[-1]]

    monkeypatch.setattr(scheduler.waiting, "preempt", noting)
    assert served(scheduler, *requests) == {one.id: expected(one) for one in requests}
    assert gave_way[0] == max(zip(priorities, "abc", strict=True))[1]


def test_nobody_is_preempted_for_ever() -> None:
    """Urgent requests keep coming, while a patient one needs several batches for its prompt, and pages are short."""
    short = dict(num_pages=8, max_num_seqs=3, max_model_len=40, max_num_batched_tokens=4)
    scheduler = Scheduler(limits(**short, enable_prefix_caching=False))
    ring, patient = FakeRing(scheduler), urgent(request("patient", 20, 4), 9)
    scheduler.add(patient)
    ids, steps = list[int](), 0
    while "patient" in scheduler.by_id:
        if len(scheduler.by_id) < 4:
            scheduler.add(request(f"urgent{steps}", [steps % VOCAB, 1, 2, 3, 4, 5], 8))
        ids += [token for output in ring.step() if output.request_id == "patient" for token in output.token_ids]
        steps += 1
        assert steps < 200, "the patient one never ends"
    assert scheduler.preemptions > 0
    assert ids == expected(patient)[0]


def test_first_come_first_served() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1))
    ring = FakeRing(scheduler)
    for name in "abc":
        scheduler.add(request(name, 3, 2))
    ends = [output.request_id for output in ring.run() if output.finish_reason]
    assert ends == ["a", "b", "c"]


def test_a_resubmitted_request_goes_on_where_it_was() -> None:
    whole = request("a", 5, 6)
    ids, _ = expected(whole)
    rest = msgspec.structs.replace(whole, output_ids=tuple(ids[:4]))
    assert served(Scheduler(limits()), rest) == {"a": (ids[4:], "length")}


def test_the_end_token_counts_only_after_min_tokens() -> None:
    asked = request("a", 5, 8, ignore_eos=False)
    eos = expected(request("a", 5, 8))[0][1]
    scheduler = Scheduler(limits(), eos_ids=(eos,))
    ring = FakeRing(scheduler)
    scheduler.add(msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, min_tokens=2)))
    banned = []
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None and step.batch.entries[0].sampling is not None
        banned.append(step.batch.entries[0].sampling.banned)
        scheduler.accept(step, ring._compute(step))
    assert banned[:3] == [(eos,), (eos,), ()]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request("x", 30, 31), "61; the context holds 60"),
        (request("x", [], 3), "no token"),
        (request("x", [VOCAB], 3), f"token {VOCAB} is not in the vocabulary"),
        (request("x", [-1], 3), "token -1"),
        (request("x", 3, 0), "max_tokens 0"),
        (request("x", 3, 3, temperature=-1.0), "temperature -1.0"),
        (request("x", 3, 3, temperature=float("nan"), seed=1), "temperature nan"),
        (request("x", 3, 3, temperature=0.5), "needs a seed"),
        (request("x", 3, 3, temperature=1.0, seed=2**64), "64 bits"),
        (request("x", 3, 3, temperature=1.0, seed=1, top_p=0.0), "top_p 0.0"),
        (request("x", 3, 3, temperature=1.0, seed=1, min_p=1.5), "min_p 1.5"),
        (request("x", 3, 3, top_k=-1), "top_k -1"),
        (request("x", 3, 3, logprobs=21), "21 logprobs"),
        (request("x", 3, 3, prompt_logprobs=21), "prompt_logprobs 21"),
        (request("x", 3, 3, repetition_penalty=0.0), "repetition_penalty 0 is not from 1e-06"),
        (request("x", 3, 3, logit_bias={VOCAB: 1.0}), "not in the vocabulary"),
        (request("x", 3, 3, logit_bias={1: float("inf")}), "a penalty or bias of inf"),
        (request("x", 3, 3, stop_token_ids=(VOCAB,)), "not in the vocabulary"),
        (request("x", 3, 3, top_k=2**31), "top_k 2147483648 is not from 0 to 2147483647"),
        (request("x", 3, 3, temperature=float("inf"), seed=1), "temperature inf is not a finite number of 0 or more"),
        (request("x", 3, 3, min_tokens=1, stop_token_ids=tuple(range(VOCAB))), "each of the 50 tokens ends the reply"),
    ],
)
def test_what_can_never_be_served_is_refused(asked: Request, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        Scheduler(limits()).add(asked)
    assert "HTTP" not in caught.value.hint, "commands and Python programs ask too"


def test_an_end_token_that_the_model_has_not_keeps_no_request_from_min_tokens() -> None:
    asked = request("a", 5, 3, ignore_eos=False, min_tokens=2)
    assert served(Scheduler(limits(), eos_ids=(VOCAB,)), asked) == {"a": (expected(asked)[0], "length")}


def test_too_many_stop_tokens_are_counted_with_those_of_the_model() -> None:
    asked = request("x", 3, 3, stop_token_ids=(2,) * MAX_BANNED, ignore_eos=False)
    with pytest.raises(RequestError, match=f"{MAX_BANNED + 1} stop tokens, .* at most {MAX_BANNED}"):
        Scheduler(limits(), eos_ids=(1,)).add(asked)


def test_more_than_the_whole_cache_is_refused() -> None:
    with pytest.raises(RequestError, match="room for 33 tokens; the whole cache holds 32"):
        Scheduler(limits(num_pages=8)).add(request("x", 30, 4))
    Scheduler(limits(num_pages=8)).add(request("x", 30, 3))


def test_one_id_runs_once() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("x", 3))
    with pytest.raises(RequestError, match="already running"):
        scheduler.add(request("x", 3))


def test_batches_need_room_beside_the_sequences() -> None:
    with pytest.raises(ConfigError, match="16 tokens leave no room for prompts beside 16"):
        Scheduler(limits(max_num_seqs=16))
    with pytest.raises(ConfigError, match=r"max_num_seqs is 0, and must be 1 at least\nhint: give 1 or more"):
        Scheduler(limits(max_num_seqs=0))


def test_a_lost_slot_is_seen() -> None:
    """The kit itself must notice a cache that is handed to another while it is in use."""
    scheduler = Scheduler(limits())
    ring = FakeRing(scheduler)
    scheduler.add(request("a", 3, 5))
    ring.step()
    ring.slots = {slot: (salt, (99, *ids[1:])) for slot, (salt, ids) in ring.slots.items()}
    with pytest.raises(AssertionError):
        ring.step()
