"""`tllm plan JOB.toml`: the best plans for a job on a cluster, with the time and memory of all its roles."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from tllm.cli.arguments.parser import option_of
from tllm.cli.display.training_plans import not_predicted, show_choices
from tllm.cli.planning.best_plans import BATCH, SEQ
from tllm.cli.planning.live_survey import measured
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.cli.planning.role_plan import has_roles, show_roles
from tllm.core.errors import ConfigError, PlanError, counted
from tllm.planner.cluster.cluster_file import read_cluster
from tllm.planner.cluster.device import Cluster
from tllm.planner.measured.survey import FILE, cluster_of, read_survey
from tllm.planner.search.training_search import TrainingSearchResult
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import config_of, spec_of
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob, read_job
from tllm.training.job.job_parts import can_mirror, role_nodes

OF_MODEL = dict(revision=None, dtype=None, quantize=None, dequantize=False, batch=BATCH, seq=SEQ)
"""Options of `tllm plan MODEL` that would change nothing, and what they are where nobody gives them."""


def is_job(name: str) -> bool:
    """Whether what is to be planned is a job, and no model."""
    return name.endswith(".toml")


def plan_job(args: argparse.Namespace) -> int:
    """Choose, or take the plan that is given, and print. ConfigError for options of a model that a job's keys say."""
    _check_options(args)
    resolved = read_job(Path(args.model), args.set)
    spec = spec_of(resolved.job)
    given = Plan.parse(args.plan, spec.num_layers) if args.plan else None
    chooser = TrainingChooser(resolved, "", spec, args.nodes or args.local or 0, given, can_mirror(resolved.job))
    shows_roles = given is None and has_roles(chooser)
    if shows_roles and (args.svg or args.explain):
        raise ConfigError(
            f"{'--svg' if args.svg else '--explain'} is of one plan's step, and machines for this job's roles are "
            "chosen beside it",
            "give --plan too, which shows the policy's part",
        )
    cluster = _cluster(args, chooser, resolved)
    if given is not None and given.world_size > len(cluster):
        raise PlanError(
            f"the plan {given} has {counted(given.world_size, 'rank')} and the cluster "
            f"{counted(len(cluster), 'device')}",
            "give a plan with fewer ranks, or leave it out",
        )
    if shows_roles:
        show_roles(args, cluster, chooser)
        return 0
    result = result_of(chooser, cluster, args.top)
    show_choices(args, cluster, result)
    if not args.json:
        before = chooser.beside_steps(result.choices[0].placed)
        print("\n".join(["", *_policy_alone(resolved.job), *not_predicted(resolved.job), *before]))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.goal == "serve":
        raise ConfigError(f"{args.model} is a job, and --goal is serve", "leave it out, or give the model to serve")
    if given := [name for name, default in OF_MODEL.items() if getattr(args, name) != default]:
        raise ConfigError(
            f"{option_of(given[0])} is for a model, and {args.model} is a job, whose keys say it",
            "leave it out; --set KEY=VALUE changes a key",
        )


def result_of(chooser: TrainingChooser, cluster: Cluster, top: int) -> TrainingSearchResult:
    """The best plans of a job, or the one that is given."""
    return chooser.predicted(cluster) if chooser.given else chooser.best(cluster, top=top)


def _policy_alone(job: Job) -> list[str]:
    """That nodes with roles take time too, which are chosen and timed only together with the plan."""
    named = " and ".join(f"{role} nodes" for role in role_nodes(job))
    return [f"this is the policy's part: {named} come on top (leave --plan out to see all)"] if named else []


def _cluster(args: argparse.Namespace, chooser: TrainingChooser, resolved: ResolvedJob) -> Cluster:
    """The machines of a file, or those that join and are measured for this very job."""
    if args.cluster:
        return read_cluster(args.cluster)
    if not args.nodes and not args.local:
        raise ConfigError(
            f"no machines are given for {args.model}",
            "give --cluster FILE, or --nodes N or --local N, which are then measured",
        )
    known = read_survey(args.keep / FILE) if args.keep else None
    request = dataclasses.replace(chooser.asked(), known=known)
    return cluster_of(measured(args, request, json.dumps(config_of(resolved.job))), chooser.spec)
