"""What `tllm teach` and `tllm rollout` share: a model in this process, or over several nodes, answers runs on other
machines, who have its secret."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tllm.cli.arguments.parser import port, user_path, whole
from tllm.cli.commands.post_training.answering_nodes import add_nodes, answer_over_nodes, has_nodes
from tllm.cli.display.logs import start_log
from tllm.cli.display.progress import progress
from tllm.server.run import bind
from tllm.spec.process_groups import RoleName

if TYPE_CHECKING:
    from tllm.node.roles.rollout_model import RolloutModel
    from tllm.spec.model_spec import ModelSpec
    from tllm.training.questions.question_server import QuestionServer
    from tllm.training.questions.run_connection import Conversation
    from tllm.training.teachers.teacher_model import TeacherModel
    from tllm.weights.load import Progress


class Answering(NamedTuple):
    """`role` is what its certificate names, `does` what it does for runs, `key` the job's key that has its address."""

    command: str
    role: RoleName
    does: str
    key: str


def add_answering_arguments(parser: argparse.ArgumentParser, model: str, role: str) -> None:
    """The model, which `model` describes, where runs reach it, their secret, and the machines that hold the model."""
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address that runs reach (%(default)s)")
    parser.add_argument("--port", type=port, default=0, metavar="PORT", help="(any free one)")
    parser.add_argument(
        "--secret",
        type=user_path,
        default=Path(f"{role}.key"),
        metavar="FILE",
        help="secret that runs must have too; written if it is not there (%(default)s)",
    )
    parser.add_argument("--threads", type=whole, metavar="N", help="of each process (cores / processes here)")
    add_nodes(parser)
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def answer_runs(
    args: argparse.Namespace,
    answering: Answering,
    conversation: Conversation[Any, Any, Any],
    open_model: Callable[[Progress], TeacherModel | RolloutModel],
) -> int:
    """Answer until Ctrl-C or SIGTERM. `open_model` is told who hears of the bytes that are read."""
    start_log(args.debug, args.quiet)

    def say(spec: ModelSpec, address: tuple[str, int]) -> None:
        _say(args, answering, spec, address)

    from tllm.training.questions.shared_secret import shared_identity

    over_nodes = has_nodes(args)
    with bind(args.host, args.port) as listening:  # a busy port shows now, not when the model is loaded
        free_port = listening.getsockname()[1]
    identity = shared_identity(args.secret, answering.role, answering.command, make=True)
    if over_nodes:
        args.port = free_port  # the same in every epoch
        return answer_over_nodes(args, answering.role, say)
    import torch

    from tllm.cluster.tls import data_server
    from tllm.training.questions.question_server import QuestionServer

    if args.threads:
        torch.set_num_threads(args.threads)
    with progress(args.quiet) as on_progress:
        model = open_model(lambda done, total: on_progress(args.model, done, total))
    server = QuestionServer(model, conversation, (args.host, args.port), data_server(identity))
    _close_on_signals(server)
    say(model.spec, server.address)
    server.serve()
    return 0


def _close_on_signals(server: QuestionServer[Any, Any, Any]) -> None:
    """The first ends it once the question at hand is answered, which may take a while; the next at once."""

    def close(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if server.is_computing:
            print("ends with the answer at hand; once more ends at once", file=sys.stderr)
        server.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, close)


def _say(args: argparse.Namespace, answering: Answering, spec: ModelSpec, address: tuple[str, int]) -> None:
    """What answers, where, and what a job needs for it."""
    from tllm.training.state.initial_weights import parameter_count

    host = socket.gethostname() if address[0] in ("0.0.0.0", "::") else address[0]
    there = f"{host}:{address[1]}"
    print(f"{args.model} ({parameter_count(spec):,} parameters) {answering.does} at {there}", flush=True)
    print(f'{answering.key} = ["{there}"] and the secret in {args.secret}', file=sys.stderr)
