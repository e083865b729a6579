"""The MODEL of a command: a path or a name, and what it comes to on this disk."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from tllm.cli.arguments.parser import size, user_path_text
from tllm.core.cache_folder import cache_folder
from tllm.hub.locate import Need, locate
from tllm.hub.repository import HubWeights, Repository

CACHE_BYTES = 32 << 30


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the revision of one that is on the hub."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a Hugging Face model (safetensors), or a GGUF file, or a name: ORG/NAME[@REVISION][:Q4_K_M], "
        "ollama:NAME[:TAG], lmstudio:PUBLISHER/NAME",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of ORG/NAME on the hub (main)")


def add_weights_cache(parser: argparse._ActionsContainer, what: str) -> None:
    """Where weights are kept that came over the network, and how many."""
    parser.add_argument(
        "--weights-cache",
        type=user_path_text,
        default=str(cache_folder()),
        metavar="DIR",
        help=f"keep {what} there (%(default)s)",
    )
    parser.add_argument(
        "--weights-cache-size",
        type=size_or_none,
        default=CACHE_BYTES,
        metavar="SIZE",
        help="of what is kept, at most; 0 keeps nothing (32GiB)",
    )


def resolve_model(args: argparse.Namespace, need: Need) -> None:
    """Put the path in the place of what was given, and into `args.hub` the weights that each node fetches for itself.
    What was found is said in one line on stderr."""
    quiet = getattr(args, "quiet", False)
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the hub's library, which is not loaded yet, reads it
    found = locate(args.model, need, args.revision, partial(_put_together, getattr(args, "weights_cache", "")))
    if found.said and not quiet:
        print(found.said, file=sys.stderr, flush=True)
    args.model, args.revision, args.hub = found.path, None, None
    if found.weights is not None:
        args.hub = HubWeights(found.weights, args.weights_cache, args.weights_cache_size)


def _put_together(cache: str, repository: Repository) -> None:
    from tllm.node.weights.whole_files import put_together

    put_together(repository, Path(cache) if cache else None)


def size_or_none(text: str) -> int:
    """A size, or 0."""
    return 0 if text == "0" else size(text)
