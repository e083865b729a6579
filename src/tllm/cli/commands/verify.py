"""Run a model split and unsplit over one prompt, and say "equal", or name the first layer and parameter that differ.

The split model runs as processes of this machine, with the wires, the cache and the kernels that serve. Every layer is
held against the unsplit model's, and every weight against the file. Where bits differ the same is done in float64,
which tells rounding from faults. Weights of few bits are computed with as the plain numbers that they stand for. Exit
code 0: equal; 1: not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from typing import Any

from tllm.api.engine_options import EngineOptions, check_device
from tllm.cli.arguments.model_argument import resolve_model
from tllm.cli.arguments.options import add_device, add_model, engine_options
from tllm.cli.arguments.parser import token_ids, whole
from tllm.cli.display.logs import start_log
from tllm.cli.display.progress import ShowProgress, progress
from tllm.cli.display.tables import indented_json
from tllm.core.errors import ConfigError, ModelError, RequestError, counted
from tllm.node.machine.machine_facts import machine_facts
from tllm.node.verify.verdict import Pass, Verdict, judge
from tllm.planner.cost.cache_room import PAGE_SIZE, RUNTIME_BYTES
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.text.tokenizer import Tokenizer

DIFFERENT = 1
EXACT = "float64"
TOKENS = 24
"""In the prompt that is taken where none is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to compute (some tokens of the whole vocabulary)")
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="IDS", help="token ids to compute: 1,2,3")
    parser.add_argument("--threads", type=whole, metavar="N", help="of each process (cores / processes)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(page_size=PAGE_SIZE, kv_cache_memory=None, max_model_len=None, max_num_seqs=1)


def run(args: argparse.Namespace) -> int:
    check_device(args.device)
    resolve_model(args, "whole")
    options = engine_options(args)
    options.plan.check_serving()
    ids = prompt_ids(args, options)
    start_log(args.debug, True)
    with progress(args.quiet) as on_progress:
        first, exact = asyncio.run(_passes(options, ids, on_progress))
    verdict = judge(first, exact, is_routed=any(layer.moe is not None for layer in options.spec.layers))
    print(as_json(verdict, first, exact) if args.json else as_text(verdict, options, len(ids)))
    return 0 if verdict.equal else DIFFERENT


def prompt_ids(args: argparse.Namespace, options: EngineOptions) -> tuple[int, ...]:
    """The prompt's token ids, or without a prompt ids spread evenly over the vocabulary.

    ModelError for a model without logits, which are what is compared last.
    """
    if options.spec.num_labels:
        raise ModelError(
            f"{options.folder} has a classification head of {counted(options.spec.num_labels, 'label')} and "
            "makes no logits",
            "verify the model that writes, from which it was made",
        )
    if options.spec.bidirectional:
        raise ModelError(f"{options.folder} is not causal: it embeds, and makes no logits of what follows")
    if options.spec.is_headless:
        raise ModelError(f"{options.folder} was saved without its head for tokens and makes no logits")
    vocabulary, room = options.spec.vocab_size, options.spec.max_model_len
    ids: tuple[int, ...] = args.prompt_ids or tuple(i * vocabulary // TOKENS for i in range(min(TOKENS, room)))
    if args.prompt is not None:
        tokenizer = Tokenizer.from_folder(args.model)
        if tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer.json, so a text means nothing", "give --prompt-ids 1,2,3")
        ids = tuple(tokenizer.encode(args.prompt))
    if not 0 < len(ids) <= room:
        raise RequestError(f"{counted(len(ids), 'prompt token')}; the context holds 1 to {room}", "give another prompt")
    if max(ids) >= vocabulary:
        raise RequestError(f"token {max(ids)} of a vocabulary of {vocabulary}", "give smaller ids")
    return ids


def has_room(options: EngineOptions, free: int) -> bool:
    """Whether all ranks together fit into `free` bytes of memory with weights in float64."""
    plain = dataclasses.replace(options.spec, quantization=None)
    weights = sum(rank.weights for rank in rank_bytes(plain, options.plan, EXACT))
    return weights + options.plan.world_size * RUNTIME_BYTES < free


def free_bytes(options: EngineOptions) -> int:
    """Bytes of free memory where the ranks compute: the machine's, or those of their devices together."""
    if options.device == "cpu":
        return machine_facts().memory_free_bytes
    from tllm.devices.choose import CPU, choose_device
    from tllm.devices.memory import free_memory

    devices = {choose_device(options.device, place) for place in range(options.plan.world_size)}
    return machine_facts().memory_free_bytes if CPU in devices else sum(map(free_memory, devices))


def as_text(verdict: Verdict, options: EngineOptions, count: int) -> str:
    """The verdict for people."""
    return "\n".join([f"plan {options.plan} in {options.dtype}, {counted(count, 'token')}", *verdict.words])


def as_json(verdict: Verdict, first: Pass, exact: Pass | None) -> str:
    """The verdict, and all that differs in each pass."""
    passes = [comparison for comparison in (first, exact) if comparison is not None]
    return indented_json({"verdict": verdict, "passes": passes})


async def _passes(options: EngineOptions, ids: tuple[int, ...], on_progress: ShowProgress) -> tuple[Pass, Pass | None]:
    """A pass in the dtype of the options, and one in float64 if the first differs and memory suffices."""
    from tllm.node.verify.verify import verify

    how: dict[str, Any] = dict(threads=options.threads or 0, device=options.device, on_progress=on_progress)
    first = await verify(options.folder, options.plan, options.dtype, ids, **how)
    if first.damaged or not first.differs or options.dtype == EXACT:
        return first, first if options.dtype == EXACT else None
    if not has_room(options, free_bytes(options)):
        return first, None
    return first, await verify(options.folder, options.plan, EXACT, ids, **how)
