"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tllm.server.choice import Scored
from tllm.server.replies import ChatLogprobs, ChosenLogprob, CompletionLogprobs, TokenLogprob
from tllm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; a token that was ruled out


def labeller(tokenizer: Tokenizer | None, as_ids: bool) -> Callable[[int], str]:
    """How tokens are called: by their text, or `token_id:7` where asked for or where there is no tokenizer."""
    if tokenizer is None or as_ids:
        return lambda token_id: f"token_id:{token_id}"
    return tokenizer.token_label


def completion_logprobs(scored: Iterable[Scored], label: Callable[[int], str]) -> CompletionLogprobs:
    """The shape of `/v1/completions`. A chosen token's own value and its value in the top list are the same number."""
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for one in scored:
        made.text_offset.append(one.offset)
        made.tokens.append(label(one.token_id))
        if one.logprobs is None:
            made.token_logprobs.append(None)
            made.top_logprobs.append(None)
            continue
        own = max(one.logprobs.logprob, _LEAST)
        top: dict[str, float] = {}
        for token_id, value in one.logprobs.top:
            top.setdefault(label(token_id), own if token_id == one.token_id else max(value, _LEAST))
        top.setdefault(label(one.token_id), own)
        made.token_logprobs.append(own)
        made.top_logprobs.append(top)
    return made


def chat_logprobs(scored: Iterable[Scored], tokenizer: Tokenizer | None, label: Callable[[int], str]) -> ChatLogprobs:
    """The shape of `/v1/chat/completions`."""
    content = []
    for one in scored:
        assert one.logprobs is not None, "chat has no prompt log-probabilities"
        top = [_named(token_id, value, tokenizer, label) for token_id, value in one.logprobs.top]
        chosen = _named(one.token_id, one.logprobs.logprob, tokenizer, label)
        content.append(ChosenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def _named(token_id: int, value: float, tokenizer: Tokenizer | None, label: Callable[[int], str]) -> TokenLogprob:
    data = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
    return TokenLogprob(label(token_id), max(value, _LEAST), data)
