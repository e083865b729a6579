"""What replies have cost a rank, counted while it serves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.models.families import save_model
from tests.unit.engine.kits import limits, request
from tllm.engine.engine import Engine
from tllm.engine.schedule.batch import Batch, BatchEntry, Results
from tllm.engine.schedule.limits import EngineConfig
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.serving_counters import ReplyCounters, tell_of_prompts
from tllm.spec.request import SamplingParams


def batch(*spans: tuple[int, int]) -> Batch:
    entries = tuple(BatchEntry(i, start, count, start, ((0, 1),)) for i, (start, count) in enumerate(spans))
    return Batch(0, entries, (0,) * sum(count for _, count in spans))


def test_only_batches_of_replies_count_and_sums_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 13.0, 20.0, 25.0])
    monkeypatch.setattr("tllm.engine.serving_counters.time", SimpleNamespace(perf_counter=lambda: next(now)))
    group = SimpleNamespace(seconds=7.0)
    counters = ReplyCounters(group)  # type: ignore[arg-type]
    replies = batch((4, 1), (9, 1))
    with counters.counting(replies):
        group.seconds += 1.0
    assert counters.stats() == {
        "reply_batches": 1,
        "reply_sequences": 2,
        "reply_rows": 2,
        "reply_keys": 15,
        "reply_seconds": 2.0,
        "compute_seconds": 2.0,
    }
    with counters.counting(batch((4, 1), (0, 5))):
        pass
    assert counters.batches == 1 and counters.seconds == 2.0
    assert counters.compute_seconds == 2.0 + 5.0, "that of prompts too"


def test_what_the_cache_had_when_a_prompt_began_is_not_told_of_when_it_begins_again() -> None:
    """It was preempted, and others have its pages now: an output of no tokens would pass for another kind."""
    scheduler = Scheduler(limits(max_num_batched_tokens=8))
    scheduler.add(request("again", 20))
    scheduler.by_id["again"].prefix.found = 8
    told = list[list[int]]()
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        tell_of_prompts(step, lambda outputs: told.append([output.computed_tokens for output in outputs]))
        sampled = (1,) * step.batch.entries[0].num_sampled
        scheduler.accept(step, Results(number=step.batch.number, token_ids=sampled))
    assert told == [[8], [12]]


@pytest.mark.parametrize("plan", ["pp=1", "pp=2", "tp=2"])
def test_every_rank_counts_each_token_of_a_reply(plan: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    with Engine.load(folder, plan, EngineConfig(cache_tokens=256)) as engine:
        engine.generate([(1, 2, 3)], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        stats = engine.stats()
    for stage in engine.stages:
        assert (stage.counters.batches, stage.counters.rows, stage.counters.keys) == (5, 5, 4 + 5 + 6 + 7 + 8)
        assert stage.counters.seconds > 0
    assert stats["turns"] == 5 and stats["turn_seconds"] > engine.stages[0].counters.seconds
    assert (engine.stages[0].tp.seconds > 0) == (plan == "tp=2")
