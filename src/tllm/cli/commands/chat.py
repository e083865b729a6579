"""Talk to a model in the terminal, with the chat template that the model came with.

/new starts over, /help says what there is, /exit or Ctrl-D ends. Ctrl-C stops a reply, and ends the chat where none is
under way.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from functools import partial

import msgspec

from tllm.api.engine_options import EngineOptions, check_device
from tllm.api.engine_thread import EngineThread
from tllm.api.open_engine import open_engine
from tllm.api.streamed_reply import StreamedReply
from tllm.cli.arguments.lora_arguments import add_one_lora, id_of_one, one_lora
from tllm.cli.arguments.model_argument import resolve_model
from tllm.cli.arguments.options import add_engine, add_sampling, engine_options
from tllm.cli.commands.generate import sampling_params
from tllm.cli.display.logs import start_log_beside_text
from tllm.cli.display.progress import loading
from tllm.core.errors import ConfigError, RequestError
from tllm.spec.lora.lora_config import ServedLoras
from tllm.spec.request import Request, SamplingParams
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

COMMANDS = "/new starts over, /exit or Ctrl-D ends; Ctrl-C stops a reply"
HELP = ("/help", "/?")


def is_command(text: str) -> bool:
    """Whether a line is meant for this program: one word after a slash. A path or a sentence goes to the model."""
    return text in HELP or (text.startswith("/") and text[1:].isalpha() and text.isascii())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    add_one_lora(parser)
    parser.set_defaults(max_num_seqs=1)  # so the cache takes no more memory than one sequence needs
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, temperature=0.7, max_tokens=512, greedy=False)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    start_log_beside_text(args.debug)
    check_device(args.device)
    resolve_model(args, "whole")
    options = engine_options(args)
    tokenizer = Tokenizer.from_folder(args.model)
    template = ChatTemplate.from_folder(args.model, tokenizer)
    if tokenizer is None or template is None:
        lacks = "tokenizer.json" if tokenizer is None else "chat template"
        raise ConfigError(f"{args.model} has no {lacks}, so it cannot chat", "`tllm generate` continues a text or ids")
    stop_ids = () if args.ignore_eos else tokenizer.eos_ids
    params = sampling_params(args, options, args.max_tokens or args.default_max_tokens, stop_token_ids=stop_ids)
    chat = Chat(tokenizer, template, params, args.stop, options.max_model_len)
    if args.system:
        chat.messages.append({"role": "system", "content": args.system})
    return _talk(chat, options, one_lora(args, options.spec), args.quiet)


class Chat:
    """A conversation so far, and how it goes on: with the adapter `lora`, whose id is known once it is loaded."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        params: SamplingParams,
        stops: list[str],
        longest: int,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.lora = ""
        self._tokenizer = tokenizer
        self._template = template
        self._params = params
        self._stops = stops
        self._longest = longest

    def restart(self) -> None:
        """Forget all but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, text: str) -> StreamedReply:
        """The reply to come to what the user says now. RequestError where the conversation has become too long."""
        self.messages.append({"role": "user", "content": text})
        prompt_ids = tuple(self._tokenizer.encode(self._template.render(self.messages), add_special_tokens=False))
        room = self._longest - len(prompt_ids)
        if room < 1:
            self.messages.pop()
            raise RequestError(
                f"the conversation is {len(prompt_ids)} tokens long and the context holds {self._longest}",
                "/new starts over",
            )
        params = msgspec.structs.replace(self._params, max_tokens=min(self._params.max_tokens, room))
        request = Request(id=uuid.uuid4().hex, prompt_ids=prompt_ids, params=params, lora=self.lora)
        return StreamedReply(request, self._tokenizer, self._stops)

    def answered(self, reply: StreamedReply) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})


def _talk(chat: Chat, options: EngineOptions, adapters: ServedLoras | None, quiet: bool) -> int:
    """The engine has a thread of its own, so that Ctrl-C ends `input` here as anywhere else."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    opening = partial(open_engine, options, adapters=adapters)
    with contextlib.closing(EngineThread(loading(quiet, opening))) as engine:
        chat.lora = id_of_one(adapters, engine.client)
        while (text := _ask_user()) is not None:
            if text == "/new":
                chat.restart()
            elif is_command(text):
                print(COMMANDS if text in HELP else f"there is no {text} ({COMMANDS})", file=sys.stderr)
            elif text:
                _answer(chat, engine, text)
    return 0


def _ask_user() -> str | None:
    """The user's next line, None at the end."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"what is typed or piped in is no text: {error}", "give a text in UTF-8") from error
    except KeyboardInterrupt:
        print()
        raise
    return None if text in ("/exit", "/quit") else text


def _answer(chat: Chat, engine: EngineThread, text: str) -> None:
    try:
        reply = chat.ask(text)
    except RequestError as error:
        print(error, file=sys.stderr)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(engine.iterate(reply.stream(engine.client))) as pieces,
    ):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()
    chat.answered(reply)
