"""Write a model as a new Hugging Face folder of plain numbers, with adapters merged into it.

An adapter is a folder as PEFT or `tllm train` with `[lora]` writes it; several are added one after another. Weights in
few bits become plain numbers. One tensor at a time is in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tllm.cli.arguments.model_argument import add_model_argument, resolve_model
from tllm.cli.arguments.parser import user_path
from tllm.planner.cost.rank_bytes import ITEM_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("out", type=user_path, metavar="OUT", help="the new folder")
    parser.add_argument(
        "--adapter",
        type=user_path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="merge this adapter; repeatable",
    )
    parser.add_argument(
        "--dtype", choices=tuple(ITEM_BYTES), help="of the numbers that are written (those of the model's files)"
    )


def run(args: argparse.Namespace) -> int:
    from tllm.training.lora.merged_model import write_merged  # with torch, which `tllm export --help` does without

    resolve_model(args, "whole")
    write_merged(Path(args.model), args.out, args.adapter, args.dtype)
    print(args.out)
    return 0
