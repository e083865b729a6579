"""Continue one prompt and print the text as it comes.

The prompt is --prompt, --prompt-ids, or what is piped in. A model folder without a tokenizer works with --prompt-ids.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tllm.api.engine_options import EngineOptions, check_device
from tllm.api.open_engine import cluster_options, open_engine, open_nodes
from tllm.api.streamed_reply import StreamedReply
from tllm.cli.arguments.lora_arguments import add_one_lora, id_of_one, one_lora
from tllm.cli.arguments.model_argument import resolve_model
from tllm.cli.arguments.options import ACCEPTANCE, add_engine, add_sampling, engine_options
from tllm.cli.arguments.parser import count, token_ids, user_path
from tllm.cli.display.logs import start_log_beside_text
from tllm.cli.display.progress import ShowProgress, loading
from tllm.cli.planning.outcome import conclude_serving
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.core.errors import ConfigError, RequestError, counted
from tllm.planner.cost.serving_load import ServingFacts
from tllm.server.latency import TimedEngine
from tllm.spec.lora.lora_config import ServedLoras
from tllm.spec.request import Request, SamplingParams
from tllm.text.generation_config import read_override, sampling_values
from tllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tllm.server.openai.engine_client import EngineClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    add_one_lora(parser)
    parser.set_defaults(max_num_seqs=1)  # so the cache takes no more memory than one sequence needs
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="IDS", help="token ids to continue: 1,2,3")
    add_sampling(parser, temperature=0.0, max_tokens=128, greedy=True)
    parser.add_argument("--logprobs", type=count, metavar="K", help="with --json: the K likeliest at each place too")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and no text before it")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument(
        "--keep",
        type=user_path,
        metavar="DIR",
        help="keep there what machines are measured to do; at the end tell on stderr what was predicted (no)",
    )


def run(args: argparse.Namespace) -> int:
    start_log_beside_text(args.debug)
    check_device(args.device)
    resolve_model(args, "whole")
    options = engine_options(args)
    tokenizer = Tokenizer.from_folder(args.model)
    prompt_ids = _prompt(args, tokenizer)
    max_tokens = room_for(args, len(prompt_ids), options)
    params = sampling_params(args, options, max_tokens, logprobs=(args.logprobs or 0) if args.json else None)
    request = Request(id=uuid.uuid4().hex, prompt_ids=prompt_ids, params=params)
    if args.stop and tokenizer is None:
        raise ConfigError(f"--stop needs a tokenizer and {args.model} has none", "leave --stop out")
    opening = _Opening(options, args.quiet, one_lora(args, options.spec))
    return asyncio.run(_generate(args, opening, request, tokenizer))


def room_for(args: argparse.Namespace, prompt_length: int, options: EngineOptions) -> int:
    """How many tokens to make: --max-tokens, else the command's own number, or as many as the context leaves."""
    context = options.max_model_len
    room = context - prompt_length
    asked: int = args.max_tokens or 1
    if room < asked:
        raise RequestError(
            f"{counted(prompt_length, 'prompt token')} and {asked} new ones make {prompt_length + asked}; "
            f"the context holds {context}",
            "shorten the prompt or ask for fewer tokens",
        )
    return min(int(args.max_tokens or args.default_max_tokens), room)


def sampling_params(args: argparse.Namespace, options: EngineOptions, max_tokens: int, **more: Any) -> SamplingParams:
    """The options of `add_sampling` as the engine takes them, with the model's defaults; a seed is drawn where none is
    given."""
    chosen = options.generation_config.fill({**vars(args), "temperature": _temperature(args)})
    most = options.generation_config.max_new_tokens
    return SamplingParams(
        max_tokens=max_tokens if most is None else min(max_tokens, most),
        **{"temperature": args.default_temperature, **sampling_values(chosen)},
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed if args.seed is not None else secrets.randbits(48),
        ignore_eos=args.ignore_eos,
        **more,
    )


def _temperature(args: argparse.Namespace) -> float | None:
    """What the user asks for, by either option. None, where nothing, for the model's own; a command that is greedy does
    not take that."""
    if args.temperature is not None or not args.is_greedy:
        temperature: float | None = args.temperature
        return temperature
    override = read_override(args.override_generation_config).temperature
    return args.default_temperature if override is None else override


def _prompt(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if args.prompt_ids is not None:
        ids: tuple[int, ...] = args.prompt_ids
        return ids
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError("there is no prompt", "give --prompt TEXT or --prompt-ids 1,2,3, or pipe a text in")
    if tokenizer is None:
        raise ConfigError(f"{args.model} has no tokenizer.json, so a text means nothing", "give --prompt-ids 1,2,3")
    found = tuple(tokenizer.encode(args.prompt if args.prompt is not None else _piped()))
    if not found:
        raise ConfigError("the prompt is empty", "give some text: this model has no token that begins one")
    return found


def _piped() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"what is piped in is no text: {error}", "give a text in UTF-8") from error


class _Opening(NamedTuple):
    """How the engine is opened."""

    options: EngineOptions
    quiet: bool
    adapters: ServedLoras | None


async def _generate(args: argparse.Namespace, opening: _Opening, request: Request, tokenizer: Tokenizer | None) -> int:
    options = opening.options
    chooser = _chooser(options, args.keep, request) if args.keep else None
    async with _open(opening, chooser) as client:
        timed = TimedEngine(client)
        request = msgspec.structs.replace(request, lora=id_of_one(opening.adapters, client))
        reply = StreamedReply(request, tokenizer, args.stop)
        async for text in reply.stream(timed):
            if text and not args.json:
                print(text, end="", flush=True)
    if args.json:
        print(msgspec.json.encode(_as_json(options, reply)).decode())
    elif reply.text:
        print()
    else:
        print(",".join(map(str, reply.token_ids)))
    if chooser is not None:
        conclude_serving(chooser, timed, None)
    return 0


def _chooser(options: EngineOptions, folder: Path, request: Request) -> ServingChooser:
    """What predicts this request; it speaks beside the text."""
    drafts = options.speculative_config
    facts = ServingFacts(
        options.dtype,
        len(request.prompt_ids),
        request.params.max_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        acceptance=ACCEPTANCE,
        kv_cache_dtype=options.kv_cache_dtype,
        draft_model=None if drafts is None else drafts.draft_spec(),
    )
    chooser = ServingChooser(options, facts, folder, 0, options.plan)
    chooser.says = partial(print, file=sys.stderr, flush=True)
    return chooser


@asynccontextmanager
async def _open(opening: _Opening, chooser: ServingChooser | None) -> AsyncIterator[EngineClient]:
    """The engine; predicted first, if it is asked for."""
    options, quiet, adapters = opening
    if chooser is not None and options.plan.world_size > 1:
        choice = chooser.choice()

        def open_measured(on_progress: ShowProgress) -> AbstractAsyncContextManager[EngineClient]:
            cluster = cluster_options(options, on_progress=on_progress, adapters=adapters)
            return open_nodes(options, cluster, choice=choice)

        async with loading(quiet, open_measured) as client:
            yield client
        return
    if chooser is not None:
        from tllm.node.coordinator.survey_cluster import survey_here

        chooser.decide(survey_here(chooser.asked(), options.threads or 0, options.device))
    async with loading(quiet, partial(open_engine, options, adapters=adapters)) as client:
        yield client


def _as_json(options: EngineOptions, reply: StreamedReply) -> dict[str, Any]:
    """`logprobs` is parallel to `token_ids`; with --logprobs K, `top_logprobs` lists K [id, value] for each."""
    top = {"top_logprobs": [one.top for one in reply.logprobs]} if reply.request.params.logprobs else {}
    return {
        "prompt_ids": reply.request.prompt_ids,
        "token_ids": reply.token_ids,
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "logprobs": [one.logprob for one in reply.logprobs],
        **top,
        "plan": str(options.plan),
        "ttft_s": round(reply.ttft_s, 6),
        "tokens_per_s": round(reply.tokens_per_s, 3),
    }
