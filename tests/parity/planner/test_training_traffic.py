"""A training step sends the bytes that the planner says, on the links of each group."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads, spec_of
from tests.support.selection import EACH_PART, in_turn
from tests.support.training.plans import full_rows, plan_of
from tests.support.training.runs import job_for, records, train
from tests.support.training.training_step import Layout, Rank, close, ranks_of
from tllm.comm.collectives import all_reduce as algorithms
from tllm.comm.collectives.group import Group
from tllm.comm.links.link import LocalLink
from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.cost import buckets
from tllm.planner.cost import rank_work as ranks
from tllm.planner.cost.messages import collective_bytes
from tllm.planner.cost.rank_work import TrainingFacts, schedule_of
from tllm.planner.cost.traffic import Traffic, step_traffic
from tllm.planner.simulate.training_step import predict_step
from tllm.spec.plan import Plan
from tllm.training.attention import context_parallel as context
from tllm.training.data import packing
from tllm.training.gradients import bucket_layout as flat
from tllm.training.gradients import compressed_reduction as compressed
from tllm.training.job.job_parts import training_facts

TOKENS, COUNT = 90, 4
TP2, TP3 = ((1, 1),), ((1, 2, 1),)

SMALL = 64
"""Bytes of norms, agreements and counts, which the planner leaves out."""

LAYOUTS = (
    Layout(shares=TP3),
    Layout(shares=TP3, recompute="layer"),
    Layout(shares=TP2, sequence=True),
    Layout(shares=TP2, sequence=True, recompute="layer"),
    Layout(2, "1f1b", shares=((1, 1), (1,))),
    Layout(2, "interleaved", chunks=2),
    Layout(cp=3),
    Layout(cp=2, recompute="selective"),
    Layout(dp=(1, 1)),
    Layout(dp=(1, 1, 1, 1), zero=2),
    Layout(2, "zero_bubble", dp=(1, 1), zero=3),
    Layout(dp=(1, 1), zero=3, recompute="layer"),
)


def sent(rank: Rank) -> dict[str, int]:
    groups: dict[str, Group] = {
        "tp": rank.mesh.tp,
        "cp": rank.cp,
        "dp": rank.groups.dp,
        "edp": rank.groups.edp,
        "ep": rank.groups.ep,
        "replica": rank.group,
    }
    counted = {name: sum(link.bytes_moved for link in group.send.values()) for name, group in groups.items()}
    return {**counted, "pp": rank.wires.bytes_sent, "servers": 0}


CASES: dict[str, tuple[torch.dtype, tuple[Layout, ...]]] = {
    "llama_mha_tied_bias": (torch.float32, LAYOUTS),
    "olmo2": (torch.bfloat16, LAYOUTS[:4]),
    "mistral": (torch.float32, LAYOUTS[6:8]),
    "deepseek_v3_moe": (torch.float32, LAYOUTS[:5]),
    "gpt_oss_moe": (torch.float32, LAYOUTS[2:5]),
    "qwen3_5": (torch.float32, LAYOUTS[1:5]),
    "gemma4": (torch.float32, LAYOUTS[1:8]),
    "gemma4_moe": (torch.float32, LAYOUTS[1:8]),
    "qwen2_moe": (torch.float32, (*LAYOUTS[3:5], Layout(dp=(1, 1, 1, 1), ep=2, zero=3))),
}


def sent_in_a_step(folder: Path, layout: Layout, dtype: torch.dtype) -> list[dict[str, int]]:
    """By each rank in its second step; in the first one ZeRO-3 knows not yet what is used next."""
    ranks, batch = ranks_of(folder, layout, dtype), full_rows(COUNT, TOKENS)
    in_threads([partial(rank.step, 1, batch, 1e-3) for rank in ranks])
    before = [sent(rank) for rank in ranks]
    in_threads([partial(rank.step, 2, batch, 1e-3) for rank in ranks])
    close(ranks)
    return [
        {name: sent(rank)[name] - count for name, count in was.items()} for rank, was in zip(ranks, before, strict=True)
    ]


def planned(folder: Path, layout: Layout, dtype: torch.dtype) -> list[Traffic]:
    spec = spec_of(folder)
    facts = TrainingFacts(TOKENS, COUNT, dtype=str(dtype).removeprefix("torch."), bucket_bytes=4096)
    return step_traffic(spec, plan_of(layout, spec.num_layers), facts)


@EACH_PART
@pytest.mark.parametrize("case", CASES)
def test_a_step_sends_what_is_planned(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    dtype, layouts = CASES[case]
    for layout in in_turn(layouts, case, CASES, part, count=5 if layouts is LAYOUTS else 1):
        for counted, expected in zip(
            sent_in_a_step(tmp_path, layout, dtype), planned(tmp_path, layout, dtype), strict=True
        ):
            wanted = dataclasses.asdict(expected)
            most = wanted.pop("ep")
            assert counted.pop("ep") <= most + SMALL
            assert counted == pytest.approx(wanted, rel=0.02, abs=SMALL), layout


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("case", ["llama", "olmo2"])
def test_as_many_messages_are_waited_for_as_recomputing_sends(
    case: str, sequence: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is computed again makes no sum at its very end, unless a norm follows that one (olmo2)."""
    save_model(case, tmp_path)
    spec, facts, put = spec_of(tmp_path), TrainingFacts(TOKENS, COUNT), LocalLink._put
    on_link = Counter[LocalLink]()

    def counted(link: LocalLink, message: torch.Tensor | bytes, nbytes: int) -> None:
        on_link[link] += 1
        put(link, message, nbytes)

    monkeypatch.setattr(LocalLink, "_put", counted)
    sent, waited = list[int](), list[float]()
    for recompute in ("none", "layer"):
        layout = Layout(shares=TP2, sequence=sequence, recompute=recompute)
        ranks = ranks_of(tmp_path, layout, torch.float32)
        in_threads([partial(rank.step, 1, full_rows(COUNT, TOKENS), 1e-3) for rank in ranks])
        (link,) = ranks[0].mesh.tp.send.values()
        assert isinstance(link, LocalLink)
        sent.append(on_link[link])
        close(ranks)
        plan = plan_of(layout, spec.num_layers)
        waited.append(predict_step(spec, plan, facts, 1e30, LinkSpeed(latency=1.0)).layers)
    assert sent[1] > sent[0]
    assert waited[1] - waited[0] == pytest.approx(sent[1] - sent[0])


def test_the_bound_of_the_experts_is_reached(tmp_path: Path) -> None:
    """Every token goes to the one other rank that there is, when each token chooses every expert."""
    save_model("mixtral", tmp_path, num_experts_per_tok=5)
    layout = Layout(dp=(1, 1), ep=2)
    for counted, expected in zip(
        sent_in_a_step(tmp_path, layout, torch.float32), planned(tmp_path, layout, torch.float32), strict=True
    ):
        assert counted["ep"] == pytest.approx(expected.ep, abs=SMALL)


def test_the_planner_counts_as_those_who_send() -> None:
    """It imports none of them, so that it starts without torch."""
    for size in (2, 3, 4, 9):
        assert collective_bytes.one_shot_limit(size) == algorithms.one_shot_limit(size)
    assert ranks.BUCKET_BYTES == flat.BUCKET_BYTES and buckets.LINE == flat.LINE
    assert ranks.INT8_BLOCK == compressed.BLOCK
    for tokens, size in ((7, 3), (64, 2), (3, 4)):
        assert ranks.zigzag_spans(tokens, size) == context.zigzag(tokens, size)
    for shares in ((1,), (3, 1), (1, 1, 1)):
        assert ranks.deal_microbatches(10, shares) == [len(part) for part in packing.deal(10, shares)]


def test_a_schedule_has_the_plans_depth_and_chunks(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    plan = plan_of(Layout(2, "1f1b", depth=2), spec.num_layers)
    assert schedule_of(plan, 5).peak_live(0) == 3


LESS: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": (dict(gradient_compression="bf16"), "dp=2"),
    "int8": (dict(gradient_compression="int8"), "dp=3"),
    "int8 cut": (dict(gradient_compression="int8"), "dp=2,zero=2"),
    "powersgd": (dict(gradient_compression="powersgd", powersgd_rank=2), "dp=2"),
    "powersgd cut": (dict(gradient_compression="powersgd", powersgd_rank=2), "dp=2,zero=1"),
    "local": (dict(local_steps=3), "dp=2,pp=2"),
    "local int8": (dict(local_steps=2, gradient_compression="int8"), "dp=2"),
}
"""Ways to send less, each with a plan."""


@pytest.mark.slow
@pytest.mark.parametrize("way", LESS)
def test_what_a_run_does_not_send_is_not_planned(way: str, tmp_path: Path) -> None:
    """The mean over the steps of a run, whose rows and numbers of each step are some thousand bytes beside."""
    more, text = LESS[way]
    save_model("llama", tmp_path / "model", hidden_size=96, intermediate_size=256)
    job = job_for(tmp_path / "model", tmp_path / "run", **more, save_steps=6, global_batch_size=6)
    counted = fmean(record.bytes_sent for record in records(train(job, text)))
    spec, facts = spec_of(tmp_path / "model"), training_facts(job)
    plan = Plan.parse(text, spec.num_layers)
    expected, exact = (
        sum(one.total for one in step_traffic(spec, plan, of))
        for of in (facts, dataclasses.replace(facts, local_steps=1, compression="none"))
    )
    assert counted == pytest.approx(expected, rel=0.05, abs=4096)
    assert expected < 0.7 * exact
