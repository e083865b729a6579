"""What a user asks of the engine and what comes back, in token ids; plain structs that also travel."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec

from tllm.core.errors import HINT, NonFiniteError, RequestError, TllmError

FinishReason = Literal["stop", "length", "cancelled", "expired", "error"]


LORA_SALT = "lora "
"""What the salt of pages that were computed with an adapter begins with; no request's own salt does."""

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
    the model, before temperature, penalties, bias and grammar; with `tempered_logprobs` those of output tokens are
    of the model at a `temperature` above 0, before all else. A reply with a `grammar` ends where that can only end,
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
    tempered_logprobs: bool = False
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


PoolingKind = Literal["last", "mean", "logprobs", "score"]
"""What a prompt comes to: the hidden state of its last token, the mean of those of all its tokens, log-probabilities of
the token after it, or what a classification head makes of its last token."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that are wanted of a prompt in place of a reply. `token_ids` are those of "logprobs"."""

    kind: PoolingKind = "last"
    token_ids: tuple[int, ...] = ()


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


TraceNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""By which ranks know a sequence that is traced; 0: it is not."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `output_ids`: tokens already given out, when a request is resubmitted after a loss.

    `lora` is the id of the adapter that it is computed with, "" for none. With `pooling` nothing is sampled, and
    `params` count for nothing: the prompt comes to `Output.pooled`. Only requests with the same `cache_salt` and the
    adapter share the keys and values of a common prefix. Ranks tell what they do for one with a `trace`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    pooling: PoolingParams | None = None
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    lora: str = ""
    scheduling: Scheduling = Scheduling()
    trace: TraceNumber = 0

    @property
    def prefix_salt(self) -> str:
        """The salt under which its pages are known: keys and values follow from the adapter too."""
        return f"{LORA_SALT}{self.lora} {self.cache_salt}" if self.lora else self.cache_salt

    def seeded(self) -> Request:
        """The same with a seed that is drawn at random, if none is given: whoever goes on with it samples the same."""
        if self.params.seed is not None:
            return self
        params = msgspec.structs.replace(self.params, seed=secrets.randbits(63))
        return msgspec.structs.replace(self, params=params)


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply that may be taken up again is made of, beside the outputs of the engine.

    `id` is what clients call the reply; from its last 32 characters, the `stem`, every id in the reply follows, and
    those of the engine's requests. `body` is that of the HTTP request, `owner` the hash of the API key that it came
    with ("" without keys), and `created` when, in Unix seconds. The rest says where the text of a choice ends: what is
    computed after a stop string nobody reads.
    """

    id: str
    body: bytes
    owner: str
    created: int
    stops: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stem(self) -> str:
        return self.id[-32:]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of one token and the `top` likeliest (id, log-probability) at its place, best first.

    `rank` is the token's own among all of the vocabulary, from 1 on.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1

    def cut(self, top: int | None) -> TokenLogprobs:
        """The same with at most so many likeliest tokens."""
        return TokenLogprobs(self.token_id, self.logprob, self.top[:top], self.rank)


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, in order. The last output of a request has a `finish_reason`.

    `logprobs` is parallel to `token_ids` when asked for. `prompt_logprobs` comes once, with or before the first
    token, and is parallel to the prompt; its first entry is None. `cached_tokens` comes with the first token: how many
    tokens of the prompt were found in the cache and not computed. `error` explains finish_reason "error", which
    `is_non_finite` where the model came to no numbers, by no fault of whoever asked. `pooled` is what a prompt that is
    pooled comes to, all at once. An output with `computed_tokens` has nothing else: it comes before the first token,
    whenever another part of the prompt begins to be computed, and says how many of its tokens are computed by then or
    will be, whoever cancels the request.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0
    computed_tokens: int = 0
    pooled: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    is_non_finite: bool = False

    def failure(self) -> TllmError:
        """The error that an output with finish_reason "error" stands for."""
        message, _, hint = self.error.partition(HINT)
        kind: type[TllmError] = NonFiniteError if self.is_non_finite else RequestError
        return kind(message, hint)


class StageSpan(msgspec.Struct, frozen=True, array_like=True):
    """All turns of the ring in which a rank computed for a sequence: the first `began` and the last `ended` at these
    Unix seconds of the rank's own clock, `turns` of them with so many `tokens`, which took `seconds` of computing."""

    trace: TraceNumber
    began: float
    ended: float
    turns: int
    tokens: int
    seconds: float


class KeptReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that may be taken up, as other processes know it: what was asked, and the outputs so far.

    Once it `is_over` no more come; `error` is what it ended with, where that is one.
    """

    record: StreamRecord
    requests: tuple[Request, ...]
    outputs: tuple[Output, ...] = ()
    is_over: bool = False
    error: str = ""
