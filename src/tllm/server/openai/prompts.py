"""`Prompts`: the prompt of a request as token ids, from a text, ids, a batch of either, or a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tllm.core.errors import UNREADABLE, RequestError
from tllm.server.http.errors import prompt_too_long
from tllm.server.openai.requests import RequestMessage
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

_IN_THREAD = 20_000  # characters: beyond this the event loop would be held up for milliseconds
IDS_AT_ONCE = 1 << 16
"""Token ids that are looked at, one after another, before others have their turn in the event loop."""

_IDS = 1 << 31
_MIXED = "a batch holds texts or lists of ids, not bare ids among them"
DEVELOPER = "developer"


@dataclass(frozen=True)
class Prompt:
    """Ids, and the text they came from where it was one."""

    ids: tuple[int, ...]
    text: str | None = None


def count_prompts(given: str | Sequence[str | int | list[int]] | None) -> int:
    """How many prompts a text is, or ids, or a batch of either."""
    return 1 if not given or isinstance(given, str) or isinstance(given[0], int) else len(given)


class Prompts:
    """Makes prompts with a model's tokenizer and chat template, where it has them."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._max_model_len = max_model_len

    async def batch(self, prompt: Any, add_special_tokens: bool) -> list[Prompt]:
        """The prompts of a completion request, in order."""
        if prompt is None or prompt == []:
            raise RequestError("a prompt is needed", "give a text, token ids, or a list of either", "prompt")
        if isinstance(prompt, str):
            return [await self.text(prompt, add_special_tokens)]
        if isinstance(prompt[0], int):
            return [await self._ids(prompt)]
        if int in set(map(type, prompt)):
            raise RequestError(_MIXED, param="prompt")
        texts = [item for item in prompt if isinstance(item, str)]
        made = iter(await self._texts(texts, add_special_tokens) if texts else ())
        return [next(made) if isinstance(item, str) else await self._ids(item) for item in prompt]

    async def text(self, text: str, add_special_tokens: bool) -> Prompt:
        """A text's prompt. A text that cannot fit is refused before work is spent on it."""
        [prompt] = await self._texts([text], add_special_tokens)
        return prompt

    async def cut(self, texts: Sequence[str]) -> list[Prompt]:
        """The prompts of texts, each cut to what the context holds."""
        tokenizer, most = self.need_tokenizer("a text"), self._max_model_len
        found = await asyncio.to_thread(lambda: [tokenizer.encode_cut(text, most) for text in texts])
        return _prompts(texts, found)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of any text."""
        [ids] = await self._encoded([text], add_special_tokens)
        return ids

    async def _texts(self, texts: Sequence[str], add_special_tokens: bool) -> list[Prompt]:
        longest = max(map(len, texts))
        if longest > _IN_THREAD:
            most = (self._max_model_len + 1) * self.need_tokenizer("a text prompt").longest_piece
            if longest > most:
                needs = f"{longest} characters, and at most {most} fit"
                raise prompt_too_long(needs, self._max_model_len)
        return _prompts(texts, await self._encoded(texts, add_special_tokens))

    async def _encoded(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Much text is encoded aside, so that other requests go on."""
        tokenizer = self.need_tokenizer("a text")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens) for text in texts]

        return encode() if sum(map(len, texts)) <= _IN_THREAD else await asyncio.to_thread(encode)

    async def chat(
        self,
        messages: Sequence[RequestMessage],
        add_special_tokens: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> Prompt:
        """A conversation's prompt; `continue_final_message` continues its last message instead of starting a reply."""
        self.need_tokenizer("a conversation")
        if self.template is None:
            raise RequestError(
                "this model has no chat template", "use /v1/completions, or start the server with --chat-template FILE"
            )
        chat = [_for_template(message, self.template.all_sources) for message in messages]
        render = self.template.render
        values = {"add_generation_prompt": not continue_final_message, **variables, "tools": tools}
        shown = (chat, [value for value in values.values() if not callable(value)])
        if len(msgspec.json.encode(shown)) > _IN_THREAD:
            text = await asyncio.to_thread(render, chat, continue_final_message=continue_final_message, **values)
        else:
            text = render(chat, continue_final_message=continue_final_message, **values)
        # the template writes the begin token itself
        return await self.text(text, add_special_tokens)

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer, or an error that names what needs it."""
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and this model's folder has none", "send token ids as the prompt", "prompt"
            )
        return self.tokenizer

    async def _ids(self, ids: list[int]) -> Prompt:
        """A prompt of ids, of which a body has room for millions: those that cannot fit are refused unseen."""
        if not ids:
            raise RequestError("a prompt has no tokens", "give at least one id", "prompt")
        if len(ids) > self._max_model_len:
            raise prompt_too_long(f"{len(ids)} tokens > {self._max_model_len}", self._max_model_len)
        for start in range(0, len(ids), IDS_AT_ONCE):
            if start:
                await asyncio.sleep(0)  # a thread would not do: these hold Python's lock
            part = ids[start : start + IDS_AT_ONCE]
            kinds = set(map(type, part))
            if kinds != {int}:
                raise RequestError(_MIXED, param="prompt")
            if min(part) < 0 or max(part) >= _IDS:
                raise RequestError(f"token ids are numbers from 0 to {_IDS - 1}", param="prompt")
        return Prompt(tuple(ids))


def _prompts(texts: Sequence[str], found: Sequence[list[int]]) -> list[Prompt]:
    if not all(found):
        raise RequestError("the prompt has no tokens", "give at least one character", "prompt")
    return [Prompt(tuple(ids), text) for ids, text in zip(found, texts, strict=True)]


def _for_template(message: RequestMessage, template: str) -> dict[str, Any]:
    """A message as chat templates read it: content is one text. Few know of developers, and would leave out what these
    say: to the others it is the system's."""
    values: dict[str, Any] = msgspec.to_builtins(message)
    values["content"] = _content(message)
    if message.role == DEVELOPER and not any(f"{mark}{DEVELOPER}{mark}" in template for mark in "'\""):
        values["role"] = "system"
    for call in values.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return values


def _content(message: RequestMessage) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for part in message.content:
        if not isinstance(part, str) and (part.type not in ("text", "input_text") or part.text is None):
            raise RequestError(f"content of type {part.type[:50]!r} is not supported, only text is", param="messages")
        texts.append(part if isinstance(part, str) else part.text or "")
    return "\n".join(texts)


def _arguments(text: str) -> Any:
    """Templates want a call's arguments as an object, clients send them as JSON text."""
    try:
        return msgspec.json.decode(text or "{}")
    except UNREADABLE as error:
        raise RequestError(f"a tool call's arguments are not JSON: {str(error)[:200]}", param="messages") from error
