"""What models take that embed or score: prompts alone, which those that see both ways compute whole."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.unit.engine.kits import FakeRing, limits, request
from tests.unit.planner.search.test_serving_search import FACTS, spec_of
from tests.unit.planner.simulate.test_role_seconds import cluster
from tllm.cli.arguments.survey_settings import serving_facts
from tllm.engine.schedule.scheduler import Scheduler
from tllm.planner.cost.flops import attention_flops
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts, ServingLoad
from tllm.planner.cost.stage_team import StageTeam
from tllm.planner.simulate.explain import ring_timelines, serving_bottleneck, turn_breakdowns
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.cut import cut_stage
from tllm.spec.plan import Plan
from tllm.spec.request import PoolingParams

SPEC = spec_of(4, (None, 3))
BOTH_WAYS = replace(SPEC, bidirectional=True)


def test_a_token_that_sees_both_ways_meets_those_after_it_too() -> None:
    (whole,) = cut_stage(BOTH_WAYS, (1,))
    for layer in BOTH_WAYS.layers[:2]:
        for lengths in ((1,), (2,), (7,), (5, 9)):
            near = layer.window or max(lengths)
            pairs = sum(abs(a - b) < near for n in lengths for a in range(n) for b in range(n))
            assert attention_flops(BOTH_WAYS, layer, whole, lengths) == 4 * 8 * 32 * pairs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("prompt", "requests"), [(400, 3), (330, 8), (512, 1), (1000, 5)])
def test_prompts_are_computed_whole_as_the_scheduler_has_them(prompt: int, requests: int, depth: int) -> None:
    """On two stages one of 512 tokens was predicted to follow itself in four parts."""
    sizes = dict(num_pages=512, page_size=16, max_model_len=1100, max_num_seqs=64, max_num_batched_tokens=1100)
    ring = FakeRing(Scheduler(limits(**sizes, hidden_size=2, is_bidirectional=True), depth=depth))
    for number in range(requests):
        asked = request(f"r{number}", [1 + number + i % 3 for i in range(prompt)], 1)
        ring.scheduler.add(msgspec.structs.replace(asked, pooling=PoolingParams()))
    ring.run()
    facts = ServingFacts("float32", prompt, 1, requests, max_model_len=1100, whole_prompts=True)
    load = ServingLoad(depth, facts)
    assert load.chunks == len(ring.sizes)
    assert load.prefill.tokens == pytest.approx(sum(map(sum, ring.sizes)) / len(ring.sizes))
    assert load.prefill.keys == prompt


def test_prompts_that_are_simulated_share_a_batch_of_the_models_context() -> None:
    """`tllm simulate` names no longest sequence: batches of 1024 tokens were taken, half of what two prompts have."""
    drafts: dict[str, Any] = dict(num_speculative_tokens=0, acceptance=0.0, speculative_config=None)
    args = argparse.Namespace(prompt=600, reply=9, concurrency=2, kv_cache_dtype="auto", **drafts)
    asked = serving_facts(args, replace(BOTH_WAYS, max_model_len=1200), "float32")
    assert ServingLoad(1, asked).chunks == 1 and ServingLoad(1, replace(asked, max_model_len=None)).chunks == 2


def test_a_prompt_passes_one_stage_after_another() -> None:
    facts = ServingFacts("float32", 512, 1, whole_prompts=True)
    one, two = (
        predict_serving(BOTH_WAYS, Plan.parse(f"pp={stages}", 4), cluster(1.0, 1.0), tuple(range(stages)), facts)
        for stages in (1, 2)
    )
    assert two.seconds > one.seconds
    in_parts = predict_serving(SPEC, Plan.parse("pp=2", 4), cluster(1.0, 1.0), (0, 1), replace(FACTS, prompt=512))
    assert in_parts.first_token < one.seconds


def test_logits_are_made_by_models_that_write_alone() -> None:
    batch = ExpectedBatch(64, 4, 16, 4)
    kinds: tuple[dict[str, Any], ...] = ({}, {"bidirectional": True}, {"is_headless": True}, {"num_labels": 3})
    for more in kinds:
        seconds = []
        for vocabulary in (4000, 40000):
            spec = replace(SPEC, vocab_size=vocabulary, **more)
            team = StageTeam(spec, cluster(1.0), (0,), cut_stage(spec, (1,)), FACTS)
            seconds.append(team.ends_time(False, True, batch).seconds)
        assert spec.writes == (not more) == (seconds[0] < seconds[1]), more


def test_what_a_model_that_embeds_spends_its_time_on_is_its_prompts() -> None:
    """Neither numbers of another reply's steps nor what these spend their time on."""
    facts = replace(FACTS, prompt=400, reply=1, concurrency=12)
    for text, machines in (("pp=1", (0,)), ("pp=2", (0, 1))):
        found = predict_serving(SPEC, Plan.parse(text, 4), cluster(1.0, 1.0), machines, facts)
        names = [f"node-{machine}" for machine in machines]
        assert found.turn.seconds == pytest.approx(found.seconds) and found.turn.batches == found.load.chunks > 1
        parts = turn_breakdowns(found, names)
        assert all(one.parts.seconds + one.waiting == pytest.approx(found.seconds) for one in parts)
        busy = sum(found.load.chunks * stage.prefill.seconds for stage in found.stages)
        assert found.bubble == pytest.approx(1 - busy / (len(machines) * found.seconds))
        assert [len(line.bars) for line in ring_timelines(found, names)] == [
            min(found.load.chunks, 2 * len(machines)) for _ in machines
        ]
        said = serving_bottleneck(found, names)
        assert "token" not in said and ("prompt's way through" in said) == (len(machines) == 1 or "others" not in said)
