"""What a survey measures, for what a plan is to be chosen for."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from tllm.cluster.settings import SurveySettings
from tllm.planner.cost.cache_room import context_of
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import ServingFacts
from tllm.spec.model_spec import ModelSpec

NODE_SECONDS, WAY_SECONDS, ALL_WAYS_SECONDS = 4.0, 1.0, 4.0
LINK_SECONDS = 30.0
LONGEST = 2048
"""Tokens that are computed at once at the most: more do not make products faster."""


def serving_settings(facts: ServingFacts, nodes: int, seconds: float = NODE_SECONDS) -> SurveySettings:
    """To serve: tokens one by one, as many as are asked for at once and with all that may be drafted, and a prompt."""
    rows = facts.concurrency * (1 + facts.num_speculative_tokens)
    return SurveySettings(
        dtype=facts.dtype,
        length=facts.prompt,
        rows=(min(facts.prompt, LONGEST),),
        sequences=tuple(sorted({1, facts.concurrency, rows})),
        measure_seconds=seconds,
        way_seconds=_way_seconds(nodes),
        link_seconds=LINK_SECONDS,
    )


def training_settings(
    facts: TrainingFacts, sizes: Sequence[int], optimizer: str, nodes: int, seconds: float = NODE_SECONDS
) -> SurveySettings:
    """To train: microbatches of these sizes; and completions, as many as a run samples at once."""
    sampling = facts.sampling
    length = min(facts.seq_len, LONGEST)
    return SurveySettings(
        dtype=facts.dtype,
        length=length,
        rows=tuple(length * size for size in sizes if size == min(sizes) or length * size <= LONGEST),
        optimizer=optimizer,
        rollouts=() if sampling is None else tuple(sorted({1, sampling.at_once})),
        prompt=0 if sampling is None else min(sampling.prompt, LONGEST),
        measure_seconds=seconds,
        way_seconds=_way_seconds(nodes),
        link_seconds=LINK_SECONDS,
    )


def serving_facts(args: argparse.Namespace, spec: ModelSpec, dtype: str) -> ServingFacts:
    """What serving is asked for on the command line; of a model that writes nothing, answers to prompts alone."""
    drafts = args.speculative_config
    return ServingFacts(
        dtype,
        args.prompt,
        args.reply if spec.writes else 1,
        args.concurrency,
        num_speculative_tokens=args.num_speculative_tokens,
        acceptance=args.acceptance,
        kv_cache_dtype=args.kv_cache_dtype,
        draft_model=None if drafts is None else drafts.draft_spec(),
        max_model_len=context_of(spec, None),
        whole_prompts=spec.bidirectional,
    )


def within(facts: ServingFacts, longest: int) -> ServingFacts:
    """What is asked for, as far as a sequence may be long."""
    reply = min(facts.reply, max(1, longest // 2))
    prompt = max(1, min(facts.prompt, longest - reply))
    return dataclasses.replace(facts, reply=reply, prompt=prompt, max_model_len=longest)


def _way_seconds(nodes: int) -> float:
    return min(WAY_SECONDS, ALL_WAYS_SECONDS / max(1, nodes * (nodes - 1) / 2))
