"""Split the model that ships with the project over three processes here, and stream what it writes.

Two stages, the second of them cut over two ranks. Shows who holds what, and that the tokens are those of one process.
Then a new model is trained for about a minute over two processes, each with the whole of it, and what came of it is
split over three in the same way. --serve-only leaves the training out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tllm
from tllm.api.engine_options import EngineOptions, engine_options
from tllm.api.open_engine import open_engine
from tllm.api.streamed_reply import StreamedReply
from tllm.cli.arguments.parser import user_path, whole
from tllm.cli.commands.status import links_line, nodes_table
from tllm.cli.demonstration.demo_training import STEPS, train_demo
from tllm.cli.display.ring_picture import ring
from tllm.cluster.heartbeat import BEAT_SECONDS
from tllm.core.errors import ConfigError, TllmError
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.text.tokenizer import Tokenizer

SHIPPED = Path(tllm.__file__).resolve().parent / "recipes" / "models" / "tiny"
TRAINED_PROMPT = "The statement"
PROMPT = 'def read_file(path):\n    """'

Show = Callable[[dict[str, Any], str], None]
"""show(the cluster's report, the text so far)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=user_path, default=SHIPPED, metavar="MODEL", help="another model's folder")
    parser.add_argument("--plan", default="pp=2,tp=1+2", metavar="PLAN", help="another plan (%(default)s)")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="another text (sampled with a fixed seed)")
    parser.add_argument("--max-tokens", type=whole, default=110, metavar="N", help="(%(default)s)")
    parser.add_argument("--steps", type=whole, default=STEPS, metavar="N", help="of training (%(default)s)")
    parser.add_argument("--serve-only", action="store_true", help="train nothing")


def run(args: argparse.Namespace) -> int:
    if args.model == SHIPPED and not SHIPPED.is_dir():
        raise ConfigError(
            f"the model of the demonstration is not at {SHIPPED}", "run `make tiny-model`, or give --model"
        )
    return asyncio.run(_serve_and_train(args))


async def _serve_and_train(args: argparse.Namespace) -> int:
    await _show_split(args.model, args.plan, args.prompt, args.max_tokens)
    if not args.serve_only:
        with tempfile.TemporaryDirectory(prefix="tllm-demo-") as folder:
            final = await train_demo(Path(folder), args.steps)
            print("split over three processes, it continues:\n")
            await _show_split(final, args.plan, TRAINED_PROMPT, args.max_tokens)
    return 0


async def _show_split(folder: Path, plan: str, prompt: str, max_tokens: int) -> None:
    """Stream a model's text from the processes of a plan, and hold its tokens to those of one process."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer.json", "give a model that has one")
    # In float32 the order of a sum does not change a greedy choice.
    options = engine_options(folder, plan, dtype="float32")
    prompt_ids = tuple(tokenizer.encode(prompt))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.6, seed=3, ignore_eos=True)
    replies = [
        StreamedReply(Request(id=uuid.uuid4().hex, prompt_ids=prompt_ids, params=params), tokenizer) for _ in range(2)
    ]
    await _demonstrate(options, prompt, *replies)


async def _demonstrate(options: EngineOptions, prompt: str, cut: StreamedReply, uncut: StreamedReply) -> None:
    ranks = options.plan.world_size
    print(f"{options.folder.name}: {options.spec.num_layers} layers over {ranks} processes\n\n{ring(options.plan)}\n")
    async with open_engine(options) as client:
        with ExitStack() as stack:
            show = _on_terminal(stack) if sys.stdout.isatty() else _as_lines()
            show(dict(client.status()), prompt)
            async for _ in cut.stream(client):
                show(dict(client.status()), prompt + cut.text)
            await asyncio.sleep(2 * BEAT_SECONDS)  # until nodes have reported the bytes of their links
            show(dict(client.status()), prompt + cut.text)
        print("" if sys.stdout.isatty() else "\n\n" + links_line(dict(client.status())))
    whole_plan = dataclasses.replace(options, plan=Plan.parse("pp=1", options.spec.num_layers))
    async with open_engine(whole_plan) as client:
        async for _ in uncut.stream(client):
            pass
    _compare(ranks, cut, uncut)


def _compare(ranks: int, cut: StreamedReply, uncut: StreamedReply) -> None:
    same = sum(a == b for a, b in zip(cut.token_ids, uncut.token_ids, strict=False))
    total = len(uncut.token_ids)
    if cut.token_ids != uncut.token_ids:
        raise TllmError(f"{same} of {total} tokens of {ranks} processes are those of one", "this is a fault: report it")
    print(
        f"all {total} tokens of {ranks} processes are those of one "
        f"({cut.tokens_per_s:.0f} tokens a second, {uncut.tokens_per_s:.0f} in one process)"
    )


def _as_lines() -> Show:
    """Without a terminal: the table once, then the text as it grows."""
    shown = 0

    def show(status: dict[str, Any], text: str) -> None:
        nonlocal shown
        if not shown:
            print(nodes_table(status) + "\n")
        print(text[shown:], end="", flush=True)
        shown = len(text)

    return show


def _on_terminal(stack: ExitStack) -> Show:
    """On a terminal: the table stays and its numbers move, the text grows under it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(refresh_per_second=12, vertical_overflow="visible"))

    def show(status: dict[str, Any], text: str) -> None:
        numbers = Text(nodes_table(status), no_wrap=True, overflow="crop")
        live.update(Group(numbers, Text(links_line(status) + "\n"), Text(text)))

    return show
