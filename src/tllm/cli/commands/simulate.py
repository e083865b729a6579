"""Play a training step, or a server's ring, on a cluster that is only described: how long, and where the time goes.

The schedule is the one that `tllm train` executes, op by op, and what an op costs is what `tllm plan` counts. Only the
model's config.json is read. The cluster file may say how a trainer works ([execution]) and how nodes fail ([failures]).
"""

from __future__ import annotations

import argparse

from tllm.api.engine_options import read_spec
from tllm.cli.arguments.model_argument import resolve_model
from tllm.cli.arguments.options import (
    add_acceptance,
    add_kv_cache_dtype,
    add_model,
    add_speculation,
    add_weight_form,
)
from tllm.cli.arguments.parser import new_file, positive, user_path, whole
from tllm.cli.display.simulated_ring import show_ring
from tllm.cli.display.simulated_step import show_step
from tllm.planner.cluster.cluster_file import read_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_weight_form(parser)
    parser.add_argument(
        "--cluster", type=user_path, metavar="FILE", required=True, help="TOML file with machines and links"
    )
    parser.add_argument("--goal", choices=("train", "serve"), default="train", help="what is played (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--svg", type=new_file, metavar="FILE", help="draw the timeline here")
    train = parser.add_argument_group("training")
    train.add_argument("--batch", type=whole, default=512, metavar="N", help="rows of a step (%(default)s)")
    train.add_argument("--seq", type=whole, default=4096, metavar="N", help="tokens of a row (%(default)s)")
    train.add_argument("--microbatch", type=whole, default=1, metavar="N", help="rows at once (%(default)s)")
    train.add_argument("--products", metavar="DTYPE", help="of linear layers' products, such as float8 (as --dtype)")
    train.add_argument(
        "--order", choices=("replicas", "stages"), default="replicas", help="what lies together in the cluster's order"
    )
    train.add_argument("--save-every", metavar="TIME", help="work between two saves, such as 30 min (the best)")
    train.add_argument("--rank", type=int, action="append", metavar="N", help="ranks to show (the first of each stage)")
    serve = parser.add_argument_group("serving")
    serve.add_argument("--prompt", type=whole, default=512, metavar="N", help="tokens of a prompt (%(default)s)")
    serve.add_argument("--reply", type=whole, default=128, metavar="N", help="tokens of a reply (%(default)s)")
    serve.add_argument("--concurrency", type=whole, default=1, metavar="N", help="requests at once (%(default)s)")
    add_kv_cache_dtype(serve)
    add_speculation(serve)
    add_acceptance(serve)
    serve.add_argument("--weight-bits", type=positive, metavar="N", help="bits of a weight, such as 4.5 (as --dtype)")
    serve.add_argument("--message-bits", type=positive, metavar="N", help="bits of a number on its way (as --dtype)")


def run(args: argparse.Namespace) -> int:
    resolve_model(args, "config")
    spec, cluster = read_spec(args.model, args.quantize, args.dequantize), read_cluster(args.cluster)
    show = show_step if args.goal == "train" else show_ring
    show(args, spec, cluster)
    return 0
