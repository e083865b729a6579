"""`--enable-lora` and what goes with it: LoRA adapters that a server loads, in vLLM's names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tllm.cli.arguments.parser import whole
from tllm.core.errors import ConfigError
from tllm.spec.lora.lora_config import CONFIG_FILE, MAX_LORA_RANK, ServedLoras

if TYPE_CHECKING:
    from tllm.node.serve.serving import Serving
    from tllm.server.openai.lora_adapters import ServedAdapters


def add_lora(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--enable-lora",
        action="store_true",
        help="serve LoRA adapters of the model too, each under a name of its own; they are loaded and unloaded while "
        "requests run (no)",
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters to begin with, as PEFT saves them",
    )
    parser.add_argument(
        "--max-loras",
        type=whole,
        metavar="N",
        help="adapters that are loaded at once at the most (as many as --lora-modules names, 1 at least)",
    )
    parser.add_argument(
        "--max-lora-rank",
        type=whole,
        default=MAX_LORA_RANK,
        metavar="R",
        help="the largest rank that an adapter may have (%(default)s)",
    )


def served_loras(args: argparse.Namespace) -> ServedLoras | None:
    """The adapters to begin with; None where none are served. ConfigError where the options do not go together."""
    given: list[str] = args.lora_modules
    if not args.enable_lora and (given or args.max_loras):
        option = "--lora-modules" if given else "--max-loras"
        raise ConfigError(f"{option} is given and adapters are not served", "give --enable-lora too")
    modules: dict[str, str] = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in modules or name in args.served_model_name:
            raise ConfigError(
                f"--lora-modules has {pair!r}, and each is NAME=FOLDER, with a name of its own",
                "such as --lora-modules sql=adapters/sql",
            )
        if not (Path(folder).expanduser() / CONFIG_FILE).is_file():
            raise ConfigError(f"{folder} has no {CONFIG_FILE}", "give the folder of an adapter as PEFT saves it")
        modules[name] = str(Path(folder).expanduser().resolve())
    if args.max_loras and len(modules) > args.max_loras:
        raise ConfigError(
            f"--lora-modules names {len(modules)} adapters and --max-loras is {args.max_loras}",
            f"give --max-loras {len(modules)}",
        )
    if not args.enable_lora:
        return None
    return ServedLoras(args.max_loras or max(1, len(modules)), args.max_lora_rank, modules)


async def open_adapters(args: argparse.Namespace, serving: Serving) -> ServedAdapters | None:
    """The adapters of a cluster that serves, once those to begin with are loaded; None where none are served."""
    if not args.enable_lora:
        return None
    await serving.adapters.load_first()
    return serving.adapters
