"""What `tllm teach` and `tllm rollout` choose a plan for, where none is given: the questions that runs will ask."""

from __future__ import annotations

import argparse

from tllm.cli.arguments.parser import option_of, whole
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.roles.answering_plans import AnsweringLoad, GroupLoad, RowLoad
from tllm.spec.model_spec import ModelSpec
from tllm.spec.process_groups import RoleName
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import RolloutConfig

CHOOSING = "choosing a plan, where none is given"
ROW, PROMPT = 512, 512
"""Tokens, where nobody says how many."""
GROUPS = {
    "max_completion_length": "tokens of a completion",
    "num_generations": "completions of a prompt",
    "max_num_seqs": "completions at once",
}
"""Keys of a job, and what they are."""


def add_row(parser: argparse.ArgumentParser) -> None:
    """What a teacher's plan is chosen for."""
    group = parser.add_argument_group(CHOOSING)
    group.add_argument("--row", type=whole, metavar="N", help=f"tokens of a row that a run asks for ({ROW})")


def add_groups(parser: argparse.ArgumentParser) -> None:
    """What a plan to sample by is chosen for; names as in a job."""
    group = parser.add_argument_group(CHOOSING)
    group.add_argument("--prompt", type=whole, metavar="N", help=f"tokens of a prompt ({PROMPT})")
    for name, what in GROUPS.items():
        default = getattr(RolloutConfig, name)
        group.add_argument(option_of(name), type=whole, metavar="N", help=f"{what} ({default})")
    group.add_argument(
        "--run-dtype", choices=("float32", "bfloat16", "float64"), help=f"that runs train in ({Job.dtype})"
    )


def asked_load(args: argparse.Namespace, role: RoleName, spec: ModelSpec) -> AnsweringLoad:
    """What a plan is chosen for, as far as the model's rows may be long."""
    if role == "teacher":
        return RowLoad.of(spec, args.dtype, min(args.row or ROW, spec.max_model_len))
    count, at_once = (_given(args, name) for name in ("num_generations", "max_num_seqs"))
    dtype = args.run_dtype or Job.dtype
    completion = min(_given(args, "max_completion_length"), max(1, spec.max_model_len - 1))
    prompt = max(1, min(args.prompt or PROMPT, spec.max_model_len - completion))
    groups = max(1, at_once // count)
    return GroupLoad.of(spec, dtype, SamplingFacts(prompt, completion, groups, count, at_once, prompt + completion))


def _given(args: argparse.Namespace, name: str) -> int:
    """As the command line has it, else as a job has it that does not say it."""
    count: int = getattr(args, name) or getattr(RolloutConfig, name)
    return count


def named_load(args: argparse.Namespace) -> list[str]:
    """Options that only say what a plan is to be chosen for, as far as they are given."""
    names = ("row", "prompt", *GROUPS, "run_dtype")
    given = [option_of(name) for name in names if getattr(args, name, None)]
    return given + ["--leave-out"] * (args.leave_out != "auto")
