"""Let a machine sample completions for runs elsewhere (task = "grpo", "rejection" or "distill"), with their weights.

A run names this address in rollout_servers, and needs the file of the secret. It sends its weights, of which only what
changed travels, then prompts with seeds. Several of these commands share the prompts of a step; what one was asked that
ends, by Ctrl-C say, the others sample.
"""

from __future__ import annotations

import argparse

from tllm.cli.arguments.options import add_device
from tllm.cli.commands.post_training.answer_runs import Answering, add_answering_arguments, answer_runs
from tllm.cli.commands.post_training.answering_load import add_groups

SAMPLES = Answering("tllm rollout", "rollout", "samples", "rollout_servers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "folder of the Hugging Face model that runs begin with, or its name: ORG/NAME"
    add_answering_arguments(parser, model, SAMPLES.role)
    add_groups(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    from tllm.devices.choose import choose_device
    from tllm.node.roles.rollout_model import RolloutModel
    from tllm.training.rollout_servers.rollout_messages import SAMPLING

    return answer_runs(args, SAMPLES, SAMPLING, lambda _: RolloutModel.open(args.model, choose_device(args.device)))
