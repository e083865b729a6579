"""`--enable-lora` and what goes with it: LoRA adapters that a command loads, in vLLM's names."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tllm.cli.arguments.parser import whole
from tllm.core.disk import given_path
from tllm.core.errors import ConfigError, WeightsError, counted
from tllm.spec.lora.lora_config import CONFIG_FILE, MAX_LORA_RANK, MAX_RANK, ServedLoras
from tllm.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from tllm.node.serve.serving import Serving
    from tllm.server.openai.engine_client import EngineClient
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
        action="extend",
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


def add_one_lora(parser: argparse._ActionsContainer) -> None:
    """For commands that give all their prompts to one adapter."""
    parser.add_argument(
        "--lora-modules",
        metavar="NAME=FOLDER",
        help="write with this LoRA adapter of the model, as PEFT saves it (none)",
    )


def one_lora(args: argparse.Namespace, spec: ModelSpec) -> ServedLoras | None:
    """What `add_one_lora` came to, an adapter of any rank; None where none was given. Raises what `served_loras` does,
    and WeightsError where it is no adapter of this model."""
    if args.lora_modules is None:
        return None
    loras = ServedLoras(1, MAX_RANK, dict([_named(args.lora_modules)]))
    check_loras(loras, spec)
    return loras


def check_loras(loras: ServedLoras | None, spec: ModelSpec) -> None:
    """Look at the adapters, if there are any, before the model is loaded. WeightsError for what is no adapter of this
    model, ConfigError for one of a larger rank than is served; both name the folder."""
    if loras is None:
        return
    from tllm.node.serve.lora_adapters import check_adapter  # which loads torch

    for folder in loras.paths.values():
        try:
            check_adapter(Path(folder), spec, loras.max_lora_rank)
        except (ConfigError, WeightsError) as error:
            raise type(error)(f"{folder}: {error.message}", error.hint) from error


def served_loras(args: argparse.Namespace) -> ServedLoras | None:
    """The adapters to begin with; None where none are served. ConfigError where the options do not go together."""
    given: list[str] = args.lora_modules
    if not args.enable_lora and (given or args.max_loras):
        option = "--lora-modules" if given else "--max-loras"
        raise ConfigError(f"{option} is given and adapters are not served", "give --enable-lora too")
    modules: dict[str, str] = {}
    for pair in given:
        name, folder = _named(pair, (*modules, *args.served_model_name))
        modules[name] = folder
    if args.max_loras and len(modules) > args.max_loras:
        raise ConfigError(
            f"--lora-modules names {counted(len(modules), 'adapter')} and --max-loras is {args.max_loras}",
            f"give --max-loras {len(modules)}",
        )
    if not args.enable_lora:
        return None
    return ServedLoras(args.max_loras or max(1, len(modules)), args.max_lora_rank, modules)


def _named(pair: str, taken: Collection[str] = ()) -> tuple[str, str]:
    """The name and the absolute folder that NAME=FOLDER gives."""
    name, _, folder = pair.partition("=")
    if not name or not folder or name in taken:
        raise ConfigError(
            f"--lora-modules has {pair!r}, and each is NAME=FOLDER, with a name of its own",
            "such as --lora-modules sql=adapters/sql",
        )
    path = given_path(folder)
    if not path.is_dir():
        raise ConfigError(f"{folder} is no folder here", "give the folder of an adapter as PEFT saves it")
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} has no {CONFIG_FILE}", "give the folder of an adapter as PEFT saves it")
    return name, str(path)


def adapters_of(args: argparse.Namespace, serving: Serving) -> ServedAdapters | None:
    """The adapters of a cluster that serves; None where none are served."""
    return serving.adapters if args.enable_lora else None


def id_of_one(loras: ServedLoras | None, client: EngineClient) -> str:
    """What requests carry that `one_lora` was made for; "" where it gave None."""
    from tllm.node.serve.serving import Serving

    if loras is None:
        return ""
    assert isinstance(client, Serving), "ranks that load adapters are nodes"
    return client.adapters.id_of(next(iter(loras.paths)))
