"""Let a model teach students that are trained elsewhere (task = "distill"): it says how likely each next token is.

A run names this address in distill.teachers, and needs the file of the secret. Several of these commands with the same
model share the rows of a run, and several runs may ask one of them. Ctrl-C ends it; what it was asked, others answer.
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
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face model, or its name: ORG/NAME")
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address that runs reach (%(default)s)")
    parser.add_argument("--port", type=port, default=0, metavar="PORT", help="(any free one)")
    parser.add_argument(
        "--secret",
        type=Path,
        default=Path("teacher.key"),
        metavar="FILE",
        help="secret that runs must have too; written if it is not there (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="to compute in (%(default)s)"
    )
    parser.add_argument("--threads", type=whole, metavar="N", help="to compute with (all cores)")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def run(args: argparse.Namespace) -> int:
    start_log(args.debug, args.quiet)
    import torch

    from tllm.cluster.tls import data_server
    from tllm.training.questions.question_server import QuestionServer
    from tllm.training.questions.shared_secret import shared_identity
    from tllm.training.state.initial_weights import parameter_count
    from tllm.training.teachers.teacher_messages import TEACHING
    from tllm.training.teachers.teacher_model import TeacherModel

    if args.threads:
        torch.set_num_threads(args.threads)
    context = data_server(shared_identity(args.secret, "teacher", "tllm teach", make=True))
    teacher = TeacherModel.open(args.model, args.dtype)
    server = QuestionServer(teacher, TEACHING, (args.host, args.port), context)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.close())
    host = socket.gethostname() if server.address[0] in ("0.0.0.0", "::") else server.address[0]
    parameters = f"{parameter_count(teacher.spec):,} parameters"
    print(f"{args.model} ({parameters}) teaches at {host}:{server.address[1]}", flush=True)
    print(f'distill.teachers = ["{host}:{server.address[1]}"] and the secret in {args.secret}', file=sys.stderr)
    server.serve()
    return 0
