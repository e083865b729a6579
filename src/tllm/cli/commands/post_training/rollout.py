"""Let a machine sample completions for runs elsewhere (task = "grpo", "rejection" or "distill"), with their weights.

A run names this address in rollout_servers, and needs the file of the secret. It sends its weights, of which only what
changed travels, then prompts with seeds. Several of these commands share the prompts of a step; what one was asked that
ends, by Ctrl-C say, the others sample.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from pathlib import Path

from tllm.cli.arguments.parser import port, whole
from tllm.cli.display.logs import start_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="folder of the Hugging Face model that runs begin with, or its name: ORG/NAME"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address that runs reach (%(default)s)")
    parser.add_argument("--port", type=port, default=0, metavar="PORT", help="(any free one)")
    parser.add_argument(
        "--secret",
        type=Path,
        default=Path("rollout.key"),
        metavar="FILE",
        help="secret that runs must have too; written if it is not there (%(default)s)",
    )
    parser.add_argument("--threads", type=whole, metavar="N", help="to compute with (all cores)")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def run(args: argparse.Namespace) -> int:
    start_log(args.debug, args.quiet)
    import torch

    from tllm.cluster.tls import data_server
    from tllm.node.roles.rollout_model import RolloutModel
    from tllm.training.questions.question_server import QuestionServer
    from tllm.training.questions.shared_secret import shared_identity
    from tllm.training.rollout_servers.rollout_messages import SAMPLING
    from tllm.training.state.initial_weights import parameter_count

    if args.threads:
        torch.set_num_threads(args.threads)
    context = data_server(shared_identity(args.secret, "rollout", "tllm rollout", make=True))
    model = RolloutModel.open(args.model)
    server = QuestionServer(model, SAMPLING, (args.host, args.port), context)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.close())
    host = socket.gethostname() if server.address[0] in ("0.0.0.0", "::") else server.address[0]
    parameters = f"{parameter_count(model.spec):,} parameters"
    print(f"{args.model} ({parameters}) samples at {host}:{server.address[1]}", flush=True)
    print(f'rollout_servers = ["{host}:{server.address[1]}"] and the secret in {args.secret}', file=sys.stderr)
    server.serve()
    return 0
