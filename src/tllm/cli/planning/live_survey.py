"""`tllm plan` for real machines: measured now, once they have joined, or earlier by the cluster that they serve in."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING

from tllm.cli.arguments.node_sources import join_text
from tllm.cli.arguments.running_cluster import asked_server, fetch
from tllm.cli.arguments.survey_settings import serving_facts, serving_settings, training_settings, within
from tllm.cli.display.progress import progress
from tllm.core.errors import ClusterError, ConfigError
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.planner.cost.cache_room import context_of
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.measured.survey import FILE, Survey, decoded, digest, read_survey
from tllm.planner.search.training_constraints import MICROBATCHES
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from tllm.node.coordinator.survey import SurveyRequest


def survey_for(args: argparse.Namespace, spec: ModelSpec) -> Survey:
    """The survey of the machines: that of a running cluster (--live), a new one, or the one saved with --keep."""
    return _of_cluster(args, spec) if args.live else _measured(args, spec)


def _of_cluster(args: argparse.Namespace, spec: ModelSpec) -> Survey:
    found, where = fetch(args).get("survey"), asked_server(args).where
    if found is None:
        raise ClusterError(
            f"the server at {where} has not measured its machines: its plan was given",
            "start it without --plan, or with --keep DIR; or give --cluster FILE",
        )
    survey = decoded(found, f"what the server at {where} tells")
    dtype = args.dtype or spec.dtype
    for what, has, wanted in (
        ("model", survey.model, digest(spec)),
        ("goal", survey.goal, args.goal),
        ("dtype", survey.dtype, dtype),
    ):
        if has != wanted:
            raise ConfigError(
                f"the cluster measured itself for {what} {has}, and {wanted} is asked for",
                "give the model, goal and dtype that it serves; or measure with --nodes",
            )
    return survey


def _measured(args: argparse.Namespace, spec: ModelSpec) -> Survey:
    from tllm.node.coordinator.survey import SurveyRequest

    nodes, dtype = args.nodes or args.local, args.dtype or spec.dtype
    if args.goal == "serve":
        facts = within(serving_facts(args, spec, dtype), context_of(spec, args.max_model_len))
        settings = serving_settings(facts, nodes)
    else:
        sizes = [size for size in MICROBATCHES if size <= args.batch]
        settings = training_settings(TrainingFacts(args.seq, args.batch, dtype=dtype), sizes, "adamw", nodes)
    known = read_survey(args.keep / FILE) if args.keep else None
    return measured(args, SurveyRequest(spec, args.goal, settings, known), json.dumps(read_config(args.model)))


def measured(args: argparse.Namespace, request: SurveyRequest, config: str) -> Survey:
    """What is asked for, measured by --nodes or --local of them, and kept where --keep says so."""
    from tllm.node.coordinator.cluster_options import ClusterOptions
    from tllm.node.coordinator.survey_cluster import survey_nodes
    from tllm.node.sources.node_source import JoinLine

    nodes = args.nodes or args.local
    joining = args.nodes - 1 if args.nodes else 0
    with progress(False) as tell:
        survey = asyncio.run(
            survey_nodes(
                request,
                config,
                nodes,
                ClusterOptions(
                    local=nodes - joining,
                    threads=args.threads or 0,
                    device=args.device,
                    address=(args.cluster_host, args.cluster_port) if joining else LOOPBACK,
                    source=JoinLine(_invite),
                    on_progress=tell,
                ),
            )
        )
    if args.keep is not None:
        survey.save(args.keep / FILE)
    return survey


def _invite(joining: int, address: str, token: str) -> None:
    """On stderr: stdout is for plans."""
    print(join_text(joining, address, token), file=sys.stderr, flush=True)
