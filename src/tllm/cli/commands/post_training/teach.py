"""Let a model teach students that are trained elsewhere (task = "distill"): it says how likely each next token is.

A run names this address in distill.teachers, and needs the file of the secret. Several of these commands with the same
model share the rows of a run, and several runs may ask one of them. Ctrl-C ends it; what it was asked, others answer.
"""

from __future__ import annotations

import argparse

from tllm.cli.commands.post_training.answer_runs import Answering, add_answering_arguments, answer_runs
from tllm.cli.commands.post_training.answering_load import add_row

TEACHES = Answering("tllm teach", "teacher", "teaches", "distill.teachers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_answering_arguments(parser, "folder of a Hugging Face model, or its name: ORG/NAME", TEACHES.role)
    add_row(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="to compute in (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from tllm.training.teachers.teacher_messages import TEACHING
    from tllm.training.teachers.teacher_model import TeacherModel

    return answer_runs(args, TEACHES, TEACHING, lambda progress: TeacherModel.open(args.model, args.dtype, progress))
