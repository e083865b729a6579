"""List the models that are on this machine: in the Hugging Face cache, of ollama, of LM Studio, and in given folders.

Only configs and headers are read. The first column is what other commands take as MODEL; the last says whether this
version can serve it, and if not, why.
"""

from __future__ import annotations

import argparse

import msgspec

from tllm.cli.arguments.parser import user_path
from tllm.cli.display.logs import errors_alone
from tllm.cli.display.tables import indented_json, table
from tllm.core.errors import ConfigError, TllmError
from tllm.core.memory import amount
from tllm.hub.found_models import FoundModel, found_models
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config

REASON_LETTERS = 60


class ListedModel(msgspec.Struct, frozen=True):
    """A model that was found. `bytes`: of its weights on this disk; `reason`: why it cannot be served, "" if it can."""

    model: str
    place: str
    path: str
    family: str
    format: str
    bytes: int
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="*", type=user_path, metavar="FOLDER", help="look for models in these too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    for folder in args.folder:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}", "give one that is there, or none")
    with errors_alone("tllm.model"):
        models = [listed(found) for found in found_models(args.folder)]
    if args.json:
        print(indented_json(models))
    else:
        print(as_text(models))
    return 0


def listed(found: FoundModel) -> ListedModel:
    """What a model's config says of it."""
    family, reason = "", found.lacks
    try:
        family = spec_from_config(read_config(found.path)).family if found.path is not None else ""
    except TllmError as error:
        reason = reason or error.message
    return ListedModel(found.name, found.place, str(found.path or ""), family, found.format, found.nbytes, reason)


def as_text(models: list[ListedModel]) -> str:
    """The table for people."""
    if not models:
        return "no models were found; `tllm generate ORG/NAME` fetches one from the Hugging Face hub"
    rows = [["model", "where", "family", "format", "size", "served"]]
    for one in models:
        reason = one.reason if len(one.reason) <= REASON_LETTERS else f"{one.reason[: REASON_LETTERS - 1]}…"
        served = f"no: {reason}" if one.reason else "yes"
        rows.append([one.model, one.place, one.family, one.format, amount(one.bytes), served])
    return table(rows)
