"""What a user asks of the engine and what comes back, in token ids; plain structs that also travel."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "expired", "error"]


GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The form that a reply must have: a JSON schema, a regular expression, one of the texts in a JSON list, or a
    context-free grammar in Lark or GBNF.

    Where `free_until` is a text, the form begins after it, and what comes before is free, as a model's reasoning is.
    With a `free_from` the free part is optional and begins with that text.
    """

    kind: GrammarKind
    text: str
    free_from: str = ""
    free_until: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Names and meanings follow the OpenAI API and vLLM.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch themselves off.
    `seed` None asks the front end to draw one, so that the engine always has a number.
    `logprobs` k returns the chosen token's log-probability and the k likeliest ones (0 to 20);
    `prompt_logprobs` does so for each prompt token but the first. Log-probabilities are those of
    the model, before temperature, penalties, bias and grammar. A reply with a `grammar` ends where that can only end,
    even before `min_tokens`; elsewhere an end token comes only where the grammar may end.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """When a request begins among others that wait. None of it changes its tokens.

    Requests of a lower `priority` begin earlier (as in vLLM). Among those of one priority, tenants get shares in
    proportion to their `weight`; a `tenant` is whoever asks, such as an API key, by name. A request that has not begun
    after `max_queue_seconds` ends as "expired".
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    max_queue_seconds: float | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `output_ids`: tokens already given out, when a request is resubmitted after a loss.

    Only requests with the same `cache_salt` share the keys and values of a common prefix.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    scheduling: Scheduling = Scheduling()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of one token and the `top` likeliest (id, log-probability) at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, in order. The last output of a request has a `finish_reason`.

    `logprobs` is parallel to `token_ids` when asked for. `prompt_logprobs` comes once, with or before the first
    token, and is parallel to the prompt; its first entry is None. `cached_tokens` comes with the first token: how many
    tokens of the prompt were found in the cache and not computed. `error` explains finish_reason "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
