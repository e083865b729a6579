"""What `tllm teach` and `tllm rollout` share: a model on this machine answers runs on others, who have its secret."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tllm.cli.arguments.parser import port, whole
from tllm.cli.display.logs import start_log

if TYPE_CHECKING:
    from tllm.node.roles.rollout_model import RolloutModel
    from tllm.training.questions.run_connection import Conversation
    from tllm.training.teachers.teacher_model import TeacherModel


class Answering(NamedTuple):
    """`role` is what its certificate names, `does` what it does for runs, `key` the job's key that has its address."""

    command: str
    role: str
    does: str
    key: str


def add_answering_arguments(parser: argparse.ArgumentParser, model: str, role: str) -> None:
    """The model, which `model` describes, where runs reach it, and their secret."""
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address that runs reach (%(default)s)")
    parser.add_argument("--port", type=port, default=0, metavar="PORT", help="(any free one)")
    parser.add_argument(
        "--secret",
        type=Path,
        default=Path(f"{role}.key"),
        metavar="FILE",
        help="secret that runs must have too; written if it is not there (%(default)s)",
    )
    parser.add_argument("--threads", type=whole, metavar="N", help="to compute with (all cores)")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def answer_runs(
    args: argparse.Namespace,
    answering: Answering,
    conversation: Conversation[Any, Any, Any],
    open_model: Callable[[], TeacherModel | RolloutModel],
) -> int:
    """Answer until Ctrl-C or SIGTERM."""
    start_log(args.debug, args.quiet)
    import torch

    from tllm.cluster.tls import data_server
    from tllm.training.questions.question_server import QuestionServer
    from tllm.training.questions.shared_secret import shared_identity
    from tllm.training.state.initial_weights import parameter_count

    if args.threads:
        torch.set_num_threads(args.threads)
    context = data_server(shared_identity(args.secret, answering.role, answering.command, make=True))
    model = open_model()
    server = QuestionServer(model, conversation, (args.host, args.port), context)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.close())
    host = socket.gethostname() if server.address[0] in ("0.0.0.0", "::") else server.address[0]
    address = f"{host}:{server.address[1]}"
    print(f"{args.model} ({parameter_count(model.spec):,} parameters) {answering.does} at {address}", flush=True)
    print(f'{answering.key} = ["{address}"] and the secret in {args.secret}', file=sys.stderr)
    server.serve()
    return 0
