"""`tllm plan --nodes`: measures machines that join, so that plans are compared for what they are."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from tllm.cli.asking import serving_settings, training_settings, within
from tllm.cli.opening import LOOPBACK
from tllm.cli.progress import progress
from tllm.planner.layouts import MICROBATCHES
from tllm.planner.load import ServingFacts
from tllm.planner.ranks import TrainingFacts
from tllm.planner.survey import FILE, Survey, read_survey
from tllm.spec.config import read_config
from tllm.spec.model import ModelSpec


def survey_for(args: argparse.Namespace, spec: ModelSpec) -> Survey:
    """What the machines are measured to do, or were when it was kept."""
    from tllm.node.survey import Asked
    from tllm.node.surveying import survey_nodes

    nodes, dtype = args.nodes or args.local, args.dtype or spec.dtype
    if args.goal == "serve":
        facts = within(ServingFacts(dtype, args.prompt, args.reply, args.concurrency), spec.max_model_len)
        settings = serving_settings(facts, nodes)
    else:
        sizes = [size for size in MICROBATCHES if size <= args.batch]
        settings = training_settings(TrainingFacts(args.seq, args.batch, dtype=dtype), sizes, "adamw", nodes)
    path = args.keep / FILE if args.keep else None
    joining = args.nodes - 1 if args.nodes else 0
    with progress(False) as tell:
        survey = asyncio.run(
            survey_nodes(
                Asked(spec, args.goal, settings, read_survey(path) if path else None),
                json.dumps(read_config(args.model)),
                nodes,
                local=nodes - joining,
                threads=args.threads or 0,
                address=(args.cluster_host, args.cluster_port) if joining else LOOPBACK,
                invite=lambda *how: _invite(joining, *how),
                tell=tell,
            )
        )
    if path is not None:
        survey.save(path)
    return survey


def _invite(joining: int, address: str, token: str) -> None:
    """On stderr: stdout is for plans."""
    others = f"each of {joining} other machines" if joining > 1 else "one other machine"
    line = f"tllm join {address} --token {token}"
    print(f"run this on {others} (the token is good for an hour):\n\n  {line}\n", file=sys.stderr, flush=True)
