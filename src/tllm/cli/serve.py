"""Serve a model over HTTP with an OpenAI-compatible interface, from this machine or from several together.

--plan alone starts what it needs here. --nodes N waits for N-1 other machines, each of which runs the `tllm join` line
that this prints. --local N starts N worker processes here that act as N machines.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tllm import __version__
from tllm.cli.logs import start_log
from tllm.cli.opening import open_engine
from tllm.cli.options import EngineOptions, add_api_key, add_engine, api_key, engine_options
from tllm.ground.errors import ConfigError
from tllm.server.app import build_app
from tllm.server.run import bind, serve_http
from tllm.server.settings import ServerSettings
from tllm.text.chat import ChatTemplate
from tllm.text.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to serve on (%(default)s)")
    http.add_argument("--port", type=int, default=8000, metavar="PORT", help="(%(default)s; 0: any free one)")
    add_api_key(http)
    http.add_argument("--served-model-name", action="append", default=[], metavar="NAME", help="one more name for it")
    http.add_argument("--chat-template", type=Path, metavar="FILE", help="instead of the model's own")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")


def run(args: argparse.Namespace) -> int:
    options = engine_options(args)
    settings = _settings(args)
    settings.check()
    bind(settings.host, settings.port).close()  # a busy port shows now, not when the model is loaded
    start_log(args.debug, args.quiet)
    tokenizer = Tokenizer.from_folder(args.model)
    template = _template(args, tokenizer)
    return asyncio.run(_serve(args, options, settings, tokenizer, template))


async def _serve(
    args: argparse.Namespace,
    options: EngineOptions,
    settings: ServerSettings,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> int:
    async with open_engine(options, args.quiet) as client:
        app = build_app(client, tokenizer, template, settings)
        await serve_http(app, lambda url: print(f"serving {client.model_name} at {url}/v1", flush=True))
    return 0


def _settings(args: argparse.Namespace) -> ServerSettings:
    key = api_key(args)
    return ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=(key,) if key else (),
        model_aliases=tuple(args.served_model_name),
        version=__version__,
    )


def _template(args: argparse.Namespace, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if args.chat_template is None:
        return ChatTemplate.from_folder(args.model, tokenizer)
    if tokenizer is None:
        raise ConfigError(f"--chat-template needs a tokenizer and {args.model} has none", "leave it out")
    return ChatTemplate.from_file(args.chat_template, tokenizer)
