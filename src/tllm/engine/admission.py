"""Refuses requests that can never be served, before they take a place."""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from tllm.engine.build import sampling_of
from tllm.engine.limits import MAX_BANNED, MAX_LOGPROBS, Limits, sampling_faults
from tllm.engine.sequence import Sequence
from tllm.ground.errors import RequestError


def admit(sequence: Sequence, limits: Limits, eos_ids: tuple[int, ...], known: Container[str]) -> None:
    """Raise RequestError unless every batch that this sequence can come to need passes the checks of every stage."""
    request, params = sequence.request, sequence.params
    if request.id in known:
        raise RequestError(f"a request with id {request.id!r} is already running", "give each request its own id")
    for fault in _faults(sequence, limits, eos_ids):
        raise RequestError(f"request {request.id}: {fault}")
    if sequence.prompt_length + params.max_tokens > limits.max_model_len:
        raise RequestError(
            f"{sequence.prompt_length} prompt tokens and {params.max_tokens} new ones make "
            f"{sequence.prompt_length + params.max_tokens}; the context holds {limits.max_model_len}",
            "shorten the prompt or ask for fewer tokens",
            param="max_tokens",
        )
    slots = limits.num_pages * limits.page_size
    if -(-sequence.longest // limits.page_size) > limits.num_pages:
        raise RequestError(
            f"the request needs room for {sequence.longest} tokens; the whole cache holds {slots}",
            "give the cache more memory, or ask for fewer tokens",
            param="max_tokens",
        )


def _faults(sequence: Sequence, limits: Limits, eos_ids: tuple[int, ...]) -> Iterator[str]:
    params = sequence.params
    if sequence.prompt_length == 0:
        yield "the prompt has no token"
    for token_id in sequence.token_ids:
        if not 0 <= token_id < limits.vocab_size:
            yield f"token {token_id} is not in the vocabulary of {limits.vocab_size}"
    if params.max_tokens < 1:
        yield f"max_tokens {params.max_tokens} is not 1 or more"
    if sequence.num_output >= max(1, params.max_tokens):
        yield f"{sequence.num_output} tokens are given out already, of max_tokens {params.max_tokens}"
    if params.temperature > 0 and params.seed is None:
        yield "a sampled request needs a seed"
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        yield f"seed {params.seed} has more than 64 bits"
    for name, value in (("top_k", params.top_k), ("logprobs", params.logprobs), ("min_tokens", params.min_tokens)):
        if not 0 <= (value or 0) < 2**31:
            yield f"{name} {value} is not 0 or more"
    if not 0 <= (params.prompt_logprobs or 0) <= MAX_LOGPROBS:
        yield f"prompt_logprobs {params.prompt_logprobs} is not 0 to {MAX_LOGPROBS}"
    if any(not 0 <= token_id < limits.vocab_size for token_id in (*params.stop_token_ids, *params.logit_bias)):
        yield f"a stop or biased token is not in the vocabulary of {limits.vocab_size}"
    if len(sequence.stop_ids(eos_ids)) > MAX_BANNED:
        yield f"{len(params.stop_token_ids)} stop tokens, at most {MAX_BANNED}"
    # Penalties apply from the first choice on, so one look at it shows all that a stage will check.
    yield from sampling_faults(msgspec.structs.replace(sampling_of(sequence, eos_ids), history=()), limits)
