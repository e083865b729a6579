"""Driver and stages in threads over a model small enough to work out by hand, whole and cut into stages and ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.support.models.layouts import in_threads
from tests.unit.engine.kits import FreeRows, limits, request
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.links.link import LocalLink
from tllm.core.errors import FrameError, LinkClosed, LinkTimeout, RequestError
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.sampler import sampling_of_each_token
from tllm.engine.driver import CancelRequest, CloseRing, Command, Driver
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import Batch, BatchEntry, Results, RingHeartbeat, Sampling, encode
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage
from tllm.model.attention import Attend, AttentionSpec
from tllm.parallel.linear import Adapt, unadapted
from tllm.spec.request import Grammar, Output, Request
from tllm.text.grammar import GrammarCompiler, GrammarMatcher, GrammarText

VOCAB, WIDTH, LAYERS = 50, 4, 4
SPEC = AttentionSpec(scale=0.5, kv_shape=(1, WIDTH))


class TinyModel:
    """Layers whose queries, keys and values are their input; logits by the rows of a fixed random table."""

    received_width, scales_by_length = WIDTH, True

    def __init__(self, layers: range, vocab: tuple[int, int], fail_at: int = -1) -> None:
        self.layers, self.is_first, self.is_last = layers, layers.start == 0, layers.stop == LAYERS
        g = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64)
        self.table = torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64)[slice(*vocab)]
        self.fail_at = fail_at
        self.calls = 0

    def __call__(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
        ids_T: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ZeroDivisionError("this stage is broken")
        x_TD = self.embedding[x] if self.is_first else x
        for layer in self.layers:
            x_TNH = (x_TD * torch.cos(positions_T[:, None] * 0.3 + layer)).unsqueeze(1)
            x_TD = x_TD + attend(layer, x_TNH, x_TNH, x_TNH).squeeze(1)
        return x_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.table.T


def stages_of(
    tps: list[int], sizes: Limits, fail: tuple[int, int] = (-1, -1), deadline: float = 20
) -> list[PipelineStage]:
    """Every rank of a ring; `fail` is (rank, at which batch)."""
    groups: list[Group] = [group for tp in tps for group in local_groups(tp, deadline)]
    leaders = [sum(tps[:i]) for i in range(len(tps))]
    hops = [LocalLink(rank, leaders[(i + 1) % len(tps)], deadline) for i, rank in enumerate(leaders)]
    stages = []
    for index, tp in enumerate(tps):
        vocabs = [(VOCAB * i // tp, VOCAB * (i + 1) // tp) for i in range(tp)]
        for place in range(tp):
            rank = leaders[index] + place
            layers = range(LAYERS * index // len(tps), LAYERS * (index + 1) // len(tps))
            model = TinyModel(layers, vocabs[place], fail[1] if rank == fail[0] else -1)
            cache = KVCache(dict.fromkeys(layers, SPEC), sizes, torch.float64)
            ring = RingLinks(hops[index - 1], hops[index]) if place == 0 and len(tps) > 1 else None
            stages.append(PipelineStage(model, cache, groups[rank], ring, sizes, vocabs))
    return stages


def close_links(stage: PipelineStage) -> None:
    stage.tp.close()
    if stage.ring is not None:
        stage.ring.previous.close()
        stage.ring.next.close()


@contextmanager
def replica(tps: list[int], heartbeat_seconds: float = 5.0, **more: int) -> Iterator[Driver]:
    sizes = limits(**{"num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, **more})
    stages = stages_of(tps, sizes)
    threads = [threading.Thread(target=stage.serve, daemon=True) for stage in stages[1:]]
    for thread in threads:
        thread.start()
    driver = Driver(stages[0], Scheduler(sizes, len(tps)), heartbeat_seconds)
    if driver.scheduler.speculation is not None:
        driver.scheduler.speculation.cost = FreeRows()
    yield driver
    driver.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a stop must end every rank"


def drive(driver: Driver, *requests: Request) -> dict[str, list[Output]]:
    outputs = [out for one in requests for out in driver.submit(one)]
    while driver.has_work:
        outputs += driver.step()
    found: dict[str, list[Output]] = {one.id: [] for one in requests}
    for output in outputs:
        found[output.request_id].append(output)
    return found


def mixed() -> list[Request]:
    rich = dict(temperature=0.9, seed=4, top_p=0.9, top_k=20, logprobs=3, prompt_logprobs=2, frequency_penalty=0.4)
    return [
        request("greedy", 9, 10),
        request("rich", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3, 12, **rich),
        request("short", [42], 3, temperature=1.2, seed=2**63),
        request("long", [7, 8] * 20, 8, logit_bias={3: 2.0}, min_tokens=4, stop_token_ids=(3,)),
    ]


@pytest.mark.parametrize("tps", [[1], [3], [1, 1], [2, 1], [1, 3], [2, 3, 1, 2]], ids=str)
def test_every_layout_gives_the_same(tps: list[int]) -> None:
    with replica([1]) as driver:
        want = drive(driver, *mixed())
    with replica(tps, max_num_seqs=3, num_pages=16) as driver:
        got = drive(driver, *mixed())
    for name, outputs in want.items():
        assert [out.token_ids for out in got[name]] == [out.token_ids for out in outputs]
        assert got[name][-1].finish_reason == outputs[-1].finish_reason
    for one, other in zip(_scores(got["rich"]), _scores(want["rich"]), strict=True):
        assert one == pytest.approx(other, abs=1e-12)
    assert len(want["rich"][0].prompt_logprobs) == 33


@pytest.mark.parametrize("tps", [[1], [3], [1, 1], [2, 3, 1, 2]], ids=str)
def test_drafts_change_no_token_and_no_score(tps: list[int]) -> None:
    asked = [
        *mixed(),
        request("again", [5, 6, 7, 8] * 4, 24, temperature=0.3, seed=1),
        request("greedy2", [5] * 20, 24),
    ]
    with replica([1]) as driver:
        want = drive(driver, *asked)
    with replica(tps, max_num_seqs=3, num_pages=24, num_speculative_tokens=5) as driver:
        got = drive(driver, *asked)
        stats = driver.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"], "some are right, some wrong"
    for name, outputs in want.items():
        assert _ids(got[name]) == _ids(outputs), name
        assert got[name][-1].finish_reason == outputs[-1].finish_reason
    assert _scores(got["rich"]) == pytest.approx(_scores(want["rich"]), abs=1e-12)


def test_penalties_see_what_is_drafted_before_a_token() -> None:
    sampling = Sampling(frequency_penalty=0.5, history=(1, 2, 3), prompt_length=2)
    entry = BatchEntry(0, 2, 3, 2, ((0, 2),), sampling, num_draft_tokens=2)
    found = [(one.history, position) for one, position in sampling_of_each_token(entry, (7, 8))]
    assert found == [((1, 2, 3), 3), ((1, 2, 3, 7), 4), ((1, 2, 3, 7, 8), 5)]
    plain = BatchEntry(0, 2, 3, 2, ((0, 2),), Sampling(), num_draft_tokens=2)
    assert list(sampling_of_each_token(plain, (7, 8))) == [(Sampling(), 3), (Sampling(), 4), (Sampling(), 5)]
    assert list(sampling_of_each_token(BatchEntry(0, 2, 3, 2, ((0, 2),)), ())) == []


def _ids(outputs: list[Output]) -> list[int]:
    return [token for out in outputs for token in out.token_ids]


def _scores(outputs: list[Output]) -> list[float]:
    found = [score for out in outputs for score in (*out.prompt_logprobs[1:], *out.logprobs)]
    return [value for one in found if one for value in (one.logprob, *(v for _, v in one.top))]


def test_a_reply_does_not_depend_on_its_neighbours() -> None:
    with replica([1]) as driver:
        together = drive(driver, *mixed())
        for one in mixed():
            alone = drive(driver, one)[one.id]
            assert [out.token_ids for out in alone] == [out.token_ids for out in together[one.id]]


def test_of_equal_logits_the_lowest_id_wins_however_the_vocabulary_is_cut() -> None:
    batch = Batch(0, (BatchEntry(0, 0, 2, 2, ((0, 1),), Sampling()),), (1, 2))
    ones = torch.ones(2, WIDTH, dtype=torch.float64)
    for tp in (1, 2, 3):
        sizes = limits()
        stages = stages_of([tp], sizes)
        for stage in stages:
            stage.model.table = torch.zeros_like(stage.model.table)  # type: ignore[attr-defined]
        samplers = [stage.sampler for stage in stages]
        results = in_threads([lambda s=sampler: s(ones, batch) for sampler in samplers])
        assert results[0] == Results(number=0, token_ids=(0,))
        assert results[1:] == [None] * (tp - 1)


def test_a_request_that_cannot_be_served_ends_alone() -> None:
    with replica([1, 1]) as driver:
        found = drive(driver, request("good", 5, 3), request("bad", 40, 30))
    assert found["bad"][0].finish_reason == "error"
    assert "the context holds 60" in found["bad"][0].error
    assert found["good"][-1].finish_reason == "length"


def test_as_many_batches_are_in_flight_as_there_are_stages() -> None:
    with replica([1, 1, 1]) as driver:
        for i in range(6):
            driver.submit(request(f"r{i}", 4, 30))
        most = 0
        for _ in range(12):
            driver.step()
            most = max(most, len(driver.in_flight))
        assert most == 2, "three, less the one that step has just taken"
        assert driver.stats()["batches_in_flight"] == 2


class SlowGrammars(GrammarCompiler):
    """Compiles nothing, and only when it is let; a grammar cannot be followed once it is known."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.let, self.known = threading.Event(), set[GrammarText]()

    def knows(self, grammar: GrammarText) -> bool:
        return grammar in self.known

    def compile(self, grammar: GrammarText) -> Any:
        assert threading.current_thread().name.startswith("tllm grammars") and self.let.wait(20)
        self.known.add(grammar)

    def matcher(self, grammar: GrammarText) -> GrammarMatcher:
        assert grammar in self.known
        raise RequestError("not this one")


def test_no_batch_waits_for_a_grammar() -> None:
    sizes = limits()
    driver = Driver(stages_of([1], sizes)[0], Scheduler(sizes))
    driver.scheduler.grammars = grammars = SlowGrammars()
    held = [with_grammar(name, "[ab]") for name in ("first", "dropped")]
    with running(driver) as (inbox, outputs, _):
        for one in (*held, request("free", 3, 3)):
            inbox.put(one)
        assert [outputs.get(timeout=20).request_id for _ in range(3)] == ["free"] * 3
        inbox.put(CancelRequest("dropped"))
        dropped = outputs.get(timeout=20)
        assert (dropped.request_id, dropped.finish_reason) == ("dropped", "cancelled")
        grammars.let.set()
        first = outputs.get(timeout=20)
        assert (first.request_id, first.error) == ("first", "not this one")
        grammars.let.clear()
        inbox.put(with_grammar("late", "[cd]"))
        inbox.put(request("next", 3, 1))
        assert outputs.get(timeout=20).request_id == "next"
        inbox.put(CloseRing())
        assert outputs.get(timeout=20).finish_reason == "cancelled"
        grammars.let.set()
    assert outputs.empty()


def with_grammar(name: str, regex: str) -> Request:
    plain = request(name, 3, 3)
    params = msgspec.structs.replace(plain.params, grammar=Grammar(kind="regex", text=regex))
    return msgspec.structs.replace(plain, params=params)


@contextmanager
def running(driver: Driver) -> Iterator[tuple[queue.SimpleQueue[Command], queue.SimpleQueue[Output], threading.Thread]]:
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def deliver(batch: list[Output]) -> None:
        for output in batch:
            if not output.computed_tokens:
                outputs.put(output)

    thread = threading.Thread(target=driver.run, args=(inbox, deliver), daemon=True)
    thread.start()
    yield inbox, outputs, thread
    thread.join(20)
    assert not thread.is_alive()


def test_run_takes_requests_cancels_and_close() -> None:
    sizes = limits()
    stages = stages_of([1, 2], sizes)
    ranks = [threading.Thread(target=stage.serve, daemon=True) for stage in stages[1:]]
    for rank in ranks:
        rank.start()
    with running(Driver(stages[0], Scheduler(sizes, 2))) as (inbox, outputs, _):
        inbox.put(request("long", 3, 57))
        assert outputs.get(timeout=20).request_id == "long"
        inbox.put(CancelRequest("long"))
        inbox.put(CancelRequest("unknown"))
        while (last := outputs.get(timeout=20)).finish_reason is None:
            pass
        assert last.finish_reason in ("cancelled", "length")
        inbox.put(request("again", 3, 2))
        assert [outputs.get(timeout=20).finish_reason for _ in range(2)] == [None, "length"]
        inbox.put(request("left", 3, 57))
        inbox.put(CloseRing())
        while (last := outputs.get(timeout=20)).finish_reason is None:
            pass
        assert last.request_id == "left"
    for rank in ranks:
        rank.join(20)
        assert not rank.is_alive()


@pytest.mark.parametrize("tps", [[1], [1, 1]])
def test_what_is_computed_of_a_prompt_is_told_before_it_is(tps: list[int]) -> None:
    """In parts of a batch, without what the cache has, and also of a request that is cancelled in that very batch."""
    with replica(tps, max_num_batched_tokens=8, max_num_seqs=2, page_size=4) as driver:
        told = list[tuple[int, int]]()
        model = driver.stage.model

        def tell(outputs: list[Output]) -> None:
            told.extend((output.computed_tokens, model.calls) for output in outputs)  # type: ignore[attr-defined]

        first = request("first", 20, 3)
        driver.submit(first)
        outputs = [output for _ in range(12) for output in driver.step(tell)]
        assert [computed for computed, _ in told] == [8, 16, 20]
        assert [calls for _, calls in told] == [0, 1, 2], "each before its batch was computed"
        assert not any(output.computed_tokens for output in outputs) and outputs[-1].finish_reason == "length"
        told.clear()
        driver.submit(msgspec.structs.replace(first, id="again"))
        driver.step(tell)
        cached = 20 // 4 * 4 - 4
        assert [computed for computed, _ in told] == [20 - cached], "its last page is computed again"
        driver.cancel("again")
        while driver.has_work:
            driver.step(tell)
        assert len(told) == 1


def test_an_idle_ring_beats_and_misses_a_node_that_is_lost() -> None:
    """As often as it is to, though requests come all the time that are refused: those send nothing round. Whoever waits
    for a beat has 20 s; who waits for one that cannot come has a tenth of a second, from when the other is lost."""
    sizes = limits()
    stages = stages_of([1, 1], sizes)
    driver = Driver(stages[0], Scheduler(sizes, 2), heartbeat_seconds=0.05)
    failures, is_lost = list[BaseException](), threading.Event()
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def drive_on() -> None:
        with pytest.raises(LinkTimeout) as caught:
            driver.run(inbox, lambda _: None)
        failures.append(caught.value)

    def serve_a_while() -> None:
        assert stages[1].serve_one()
        began = time.monotonic()
        for _ in range(11):
            assert stages[1].serve_one()
        assert time.monotonic() - began > 10 * 0.05, "no oftener than it is to"
        assert stages[0].ring is not None
        stages[0].ring.previous.set_deadline(0.1)
        is_lost.set()

    def ask_in_vain() -> None:
        number = 0
        while not is_lost.wait(0.01):
            inbox.put(request(f"too long {number}", 40, 30))
            number += 1

    in_threads([drive_on, serve_a_while, ask_in_vain])
    assert "rank 1" in str(failures[0])


def test_a_broken_stage_ends_its_neighbours_with_its_name() -> None:
    sizes = limits()
    stages = stages_of([1, 1], sizes, fail=(1, 3))
    driver = Driver(stages[0], Scheduler(sizes, 2))

    def serve() -> None:
        try:
            stages[1].serve()
        finally:
            close_links(stages[1])

    def drive_on() -> None:
        driver.submit(request("a", 3, 20))
        while driver.has_work:
            driver.step()

    thread_failures: list[type[BaseException]] = []

    def caught(run: Callable[[], None], kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            run()
        thread_failures.append(kind)

    in_threads([lambda: caught(serve, ZeroDivisionError, "broken"), lambda: caught(drive_on, LinkClosed, "rank 1")])
    assert len(thread_failures) == 2


def test_what_comes_round_must_be_what_was_sent() -> None:
    sizes = limits()
    stages = stages_of([1, 1], sizes)
    driver = Driver(stages[0], Scheduler(sizes, 2), heartbeat_seconds=0.0)
    assert stages[1].ring is not None
    stages[1].ring.next.send_bytes(encode(Results(number=3, token_ids=(1,))))
    driver.submit(request("a", 3, 20))
    with pytest.raises(FrameError, match="batch 0 was next"):
        driver.step()
    stages[1].ring.next.send_bytes(encode(Results(number=3)))
    driver.in_flight.clear()
    with pytest.raises(FrameError, match="Results came round the ring after RingHeartbeat"):
        driver.beat_if_due()
    stages[1].ring.next.send_bytes(encode(RingHeartbeat()))
    with pytest.raises(FrameError, match="RingHeartbeat came round the ring while batch 7"):
        stages[0].finish(Batch(7, (), ()))


def test_a_stage_refuses_a_batch_beyond_its_limits() -> None:
    stages = stages_of([1, 1], limits())
    assert stages[0].ring is not None
    stages[0].ring.next.send_bytes(encode(Batch(0, (BatchEntry(0, 0, 1, 1, ((99, 1),)),), (1,))))
    with pytest.raises(FrameError, match=r"pages \[99, 100\) of 16"):
        stages[1].serve()
    stages[0].ring.next.send_bytes(encode(Results(number=0)))
    with pytest.raises(FrameError, match="waits for batches"):
        stages[1].serve()
