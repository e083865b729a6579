"""A conversation as the text a model was trained on, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tllm.core.errors import ConfigError, RequestError
from tllm.text.template_sandbox import Sandbox, TemplateLimit
from tllm.text.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE = "\ue000continue\ue001"  # private-use characters, stripped from no template's output but found in it
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """Turns messages into a prompt. `variables` (bos_token and the like) are visible to the template."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source, self.tool_source = source, tool_source
        self.all_sources = source + (tool_source or "")
        self._variables = dict(variables or {})
        self._sandbox = Sandbox()
        self._template = self._compile(source)
        self._tool_template = self._compile(tool_source) if tool_source is not None else self._template

    @classmethod
    def from_folder(cls, folder: Path | str, tokenizer: Tokenizer | None) -> ChatTemplate | None:
        """The template of a model folder (a file of its own comes before tokenizer_config.json), or None."""
        if tokenizer is None:
            return None
        file = Path(folder) / "chat_template.jinja"
        if file.exists():
            return cls(_read(file), tokenizer.special_tokens)
        value = tokenizer.config.get("chat_template")
        if value is None:
            return None
        if isinstance(value, str):
            return cls(value, tokenizer.special_tokens)
        named = _named(value)
        default = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        if default is None:
            raise ConfigError(
                f"tokenizer_config.json has chat templates {sorted(named)} and none called 'default'",
                "give one with --chat-template FILE",
            )
        return cls(default, tokenizer.special_tokens, named.get("tool_use"))

    @classmethod
    def from_file(cls, file: Path | str, tokenizer: Tokenizer | None) -> ChatTemplate:
        """A template from a file of the user's, with the tokenizer's special tokens."""
        return cls(_read(Path(file)), tokenizer.special_tokens if tokenizer is not None else {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. `continue_final_message` leaves the last message open for more."""
        chat = [_reasoning(message) for message in messages]
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        template = self._tool_template if tools else self._template
        values = {
            "documents": None,
            **self._variables,
            **variables,
            "messages": chat,
            "tools": tools,
        }
        values["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._sandbox.render(template, values)
        except TemplateLimit as error:
            raise RequestError(str(error), "send fewer or shorter messages", param="messages") from error
        except _TEMPLATE_FAULTS as error:
            reason = str(error)[:500] or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}",
                param="messages",
            ) from error
        return _cut(text) if continue_final_message else text

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return self._sandbox.compile_template(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(
                f"the chat template cannot be read: {str(error)[:300]}",
                "give another with --chat-template FILE",
            ) from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template {file} cannot be read: {getattr(error, 'strerror', None) or error}",
            "give a UTF-8 text file",
        ) from error


def _named(value: Any) -> dict[str, str]:
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            "tokenizer_config.json: chat_template is neither a text nor a list of {name, template}",
            "give one with --chat-template FILE",
        ) from error


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning under `reasoning_content` (or `thinking`), clients send three names."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message with text content",
            param="messages",
        )
    return {**message, "content": content + _CONTINUE + " "}


def _cut(text: str) -> str:
    """Cut after the last message's own text; where the template trimmed it, trim it here too."""
    place = text.rfind(_CONTINUE)
    if place < 0:
        raise RequestError(
            "the model's chat template does not show the last message as it is",
            param="messages",
        )
    kept = text[place + len(_CONTINUE) :].startswith(" ")
    return text[:place] if kept else text[:place].rstrip()
