"""A survey of a CUDA device predicts what a step of a whole model takes there, and a cut layer its fixed cost."""

from __future__ import annotations

import dataclasses
import statistics
import time
from functools import partial

import pytest
import torch

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.cluster.settings import SurveySettings
from tllm.comm.collectives.group import solo
from tllm.engine.assembly import make_driver, make_stage
from tllm.engine.measure.benchmark_layers import fill
from tllm.engine.measure.step_speed import decode_step
from tllm.engine.schedule.limits import EngineConfig, limits_of
from tllm.model.transformer import build
from tllm.node.roles.survey_rank import examined
from tllm.parallel.mesh import mesh_of
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.survey import Survey, cluster_of, digest
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.plan import Plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

DEVICE = torch.device("cuda", 0)
PROMPT, REPLY = 256, 64
SPEC = dataclasses.replace(
    spec_of(20, heads=16),
    hidden_size=2048,
    intermediate_size=5632,
    head_dim=128,
    attention_scale=128**-0.5,
    vocab_size=32000,
)


@torch.inference_mode()
def measured_step(sequences: int) -> float:
    """Seconds of a step of the whole model, the median, one after another as a survey measures them."""
    plan = Plan.parse("pp=1", SPEC.num_layers)
    mesh = mesh_of(SPEC, plan, 0, solo())
    model = build(SPEC, mesh, torch.bfloat16, DEVICE)
    fill(model, SPEC)
    sizes = EngineConfig(dtype="bfloat16", max_model_len=1024, max_num_seqs=sequences, enable_prefix_caching=False)
    driver = make_driver(make_stage(model, mesh, plan, None, limits_of(SPEC, plan, sizes)), SPEC, plan)
    driver.overlap = None
    step, taken = partial(decode_step, driver, sequences, PROMPT, lambda outputs: None), list[float]()
    for _ in range(REPLY):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@pytest.mark.parametrize("sequences", [1, 16])
def test_a_step_of_a_whole_model_takes_what_the_survey_says(sequences: int) -> None:
    settings = SurveySettings(
        dtype="bfloat16",
        length=PROMPT,
        rows=(PROMPT,),
        sequences=tuple(sorted({1, sequences})),
        measure_seconds=2.0,
        way_seconds=0.1,
        link_seconds=5.0,
        device=str(DEVICE),
    )
    node = examined("here", SPEC, settings)
    survey = Survey(model=digest(SPEC), goal="serve", dtype="bfloat16", nodes=(node,))
    cluster, facts = cluster_of(survey, SPEC), ServingFacts("bfloat16", PROMPT, REPLY, sequences)
    plan = Plan.parse("pp=1", SPEC.num_layers)
    predicted = predict_serving(SPEC, plan, cluster, (0,), facts)
    step = measured_step(sequences)
    assert predicted.per_token == pytest.approx(step, rel=0.25), node
    assert cluster.devices[0].operation_seconds > 0, "half of a layer starts as many operations as a whole one"
