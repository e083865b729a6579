"""From a request's fields to `SamplingParams`: defaults, the room a prompt leaves, one seed for each choice."""

from __future__ import annotations

import secrets

from tllm.core.errors import RequestError
from tllm.server.http.errors import HttpError
from tllm.server.openai.requests import BIASES, SamplingFields
from tllm.spec.request import SamplingParams

_SEEDS = 1 << 63
_GREEDY_BELOW = 1e-5  # a smaller temperature divides logits out of range and means the same


def budget(request: SamplingFields, prompt_tokens: int, limit: int, default: int | None) -> int:
    """How many tokens may be generated: what was asked, or `default`, or (None) all that the context leaves."""
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    room = limit - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = f"{prompt_tokens} prompt tokens" + (f" and {asked} to generate" if asked else "")
        message = f"the model's context is {limit} tokens, the request needs {wanted}; shorten the prompt or max_tokens"
        param = "max_tokens" if room > 0 else "prompt"
        raise HttpError(400, message, code="context_length_exceeded", param=param)
    if asked is None:
        asked = room if default is None else min(default, room)
    if request.min_tokens and request.min_tokens > asked:
        raise RequestError(f"min_tokens is {request.min_tokens} and max_tokens {asked}", param="min_tokens")
    return asked


def seeds(request: SamplingFields, count: int) -> list[int]:
    """A seed for each of `count` choices: seed, seed+1, …; drawn where the request gives none."""
    first = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    return [(first + place) % _SEEDS for place in range(count)]


def sampling_params(
    request: SamplingFields,
    max_tokens: int,
    seed: int,
    eos_ids: tuple[int, ...],
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters. The engine always makes one token; a caller that wants none drops it."""
    temperature = 1.0 if request.temperature is None else request.temperature
    stop_ids = tuple(request.stop_token_ids or ())
    return SamplingParams(
        max_tokens=max(1, max_tokens),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_biases(request.logit_bias or {}),
        seed=seed,
        stop_token_ids=stop_ids if request.ignore_eos else tuple(dict.fromkeys((*stop_ids, *eos_ids))),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _biases(given: dict[str, float]) -> dict[int, float]:
    if len(given) > BIASES:
        raise RequestError(f"logit_bias has {len(given)} entries, at most {BIASES} are taken", param="logit_bias")
    if any(not (key.isascii() and key.isdigit() and len(key) <= 9) for key in given):
        raise RequestError("logit_bias maps token ids, written as text, to numbers", param="logit_bias")
    return {int(key): value for key, value in given.items()}
