"""The sizes on which the ranks of a replica agree before the first batch, and the checks that enforce them.

`EngineConfig` is what the user may say about the engine's sizes, `Limits` what follows for a model and a plan. Requests
are checked when they come (`check_request`), batches and results by the rank that receives them (`check_batch`,
`check_results`), so that no rank computes what lies outside its cache or vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterator
from itertools import chain
from typing import get_args

import msgspec

from tllm.cluster.messages import MEMBER_BYTES
from tllm.cluster.settings import OUR_LINKS, Narrowing, Wiring
from tllm.core.errors import CapacityError, ConfigError, FrameError, RequestError, counted
from tllm.engine.schedule.batch import Batch, BatchEntry, Results, Sampling
from tllm.planner.cost.cache_room import (
    CACHE_DIR_BYTES,
    MAX_NUM_SEQS,
    PAGE_SIZE,
    batch_tokens,
    cache_pages,
    check_counts,
    context_of,
)
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.quantized.cache_form import check_kv_cache_dtype
from tllm.spec.quantized.weight_form import Quantize
from tllm.spec.request import LORA_SALT, PoolingParams, Request
from tllm.spec.speculative_config import SpeculativeConfig, read_speculative_config

log = logging.getLogger("tllm.engine")

NO_TOKEN = "the prompt has no token"
HINTS = {NO_TOKEN: "give some text, or ids"}
"""What to do about faults that do not say it themselves."""

MAX_LOGPROBS = 20
LOGPROB_BYTES, LIKELY_BYTES = 64, 16
"""Of a prompt's token, and of each of the likeliest in its place, in the one message that has all of a prompt."""

MAX_BIASED = 1024
MAX_BANNED = 256
MAX_PENALTY = 1e6
"""Of a bias or a penalty: a sum or a product of any logit with it is a finite number."""

MAX_POOLED_LOGPROBS = 64
"""Tokens after a prompt whose log-probabilities one request may ask for."""

MAX_FORCED = 16
"""Tokens that a grammar forces and one batch checks of a sequence, even where nothing else is drafted."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that every rank of a replica shares: of the cache, the model and a batch.

    `num_pages` pages of `page_size` tokens each are the KV cache. A batch has at most `max_num_batched_tokens` tokens
    of `max_num_seqs` sequences, and of one sequence at most `num_speculative_tokens` draft tokens (0: no speculation).
    With `enable_prefix_caching` pages outlive their sequences, for others with the same prefix. `kv_cache_dtype` says
    how keys and values are held (`spec.quantized.cache_form`). `num_state_slots` sequences can have states, in layers
    that have those in place of keys and values: as many as can run, or 0. `hidden_size` is the model's width, and
    `num_labels` those of its classification head, or 0; a model that `is_headless` has no head for tokens either. One
    that `is_bidirectional` computes all tokens of a prompt at once, as each sees those after it.
    """

    num_pages: int
    vocab_size: int
    max_model_len: int
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    num_speculative_tokens: int = 0
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    num_state_slots: int = 0
    hidden_size: int = 0
    num_labels: int = 0
    is_headless: bool = False
    is_bidirectional: bool = False

    def check(self) -> None:
        """Refuse sizes with which no batch could be made, and a cache that nobody knows."""
        check_kv_cache_dtype(self.kv_cache_dtype)
        check_counts(page_size=self.page_size, max_num_seqs=self.max_num_seqs)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"batches of {self.max_num_batched_tokens} tokens leave no room for prompts beside "
                f"{counted(self.max_num_seqs, 'sequence')}",
                f"give --max-num-seqs less than {self.max_num_batched_tokens}",
            )
        room = self.max_num_batched_tokens - self.max_num_seqs
        if not 0 <= self.num_speculative_tokens <= room:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and batches of "
                f"{counted(self.max_num_batched_tokens, 'token')} have room for {room} beside "
                f"{counted(self.max_num_seqs, 'sequence')}",
                "4 to 16 are usual; 0 for none",
            )

    def may_begin(self, tokens: int, room: int) -> bool:
        """Whether a sequence of so many tokens may begin in a batch with `room` for so many."""
        return tokens <= room or not self.is_bidirectional

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens of one sequence that a batch may have, from whoever proposed them."""
        return max(self.num_speculative_tokens, MAX_FORCED)

    @property
    def mask_bytes(self) -> int:
        """The most that a packed set of tokens may take: a bit for each token, and what deflating may add."""
        return self.vocab_size // 8 + 64

    @property
    def batch_bytes(self) -> int:
        """No honest batch takes more: some bytes a token and page, each sequence's sampling with its history, masks."""
        per_sequence = 1024 + 16 * self.max_model_len + 32 * MAX_BIASED + 8 * MAX_BANNED
        masks = min(self.max_num_seqs * (1 + self.max_draft_tokens), self.max_num_batched_tokens) * self.mask_bytes
        return 4096 + 16 * self.max_num_batched_tokens + self.max_num_seqs * per_sequence + masks

    @property
    def results_bytes(self) -> int:
        """No honest results take more: each token of a batch with its likeliest ones, and what prompts come to."""
        tokens = (self.max_num_seqs + self.max_num_batched_tokens) * (64 + 32 * (MAX_LOGPROBS + 1))
        return 4096 + tokens + self.max_num_seqs * (16 + 9 * self.pooled_width)

    @property
    def pooled_width(self) -> int:
        """The most numbers that a chunk of a prompt comes to."""
        return max(2 * self.hidden_size, self.num_labels, MAX_POOLED_LOGPROBS)


def check_request(
    request: Request, stop_ids: tuple[int, ...], sampling: Sampling, limits: Limits, running: Container[str]
) -> None:
    """Raise RequestError unless every batch that this request can come to need passes the checks of every stage.

    `stop_ids` are the tokens that end it, `sampling` that of its first token; `running` are the ids of other requests.
    """
    params, prompt_length = request.params, len(request.prompt_ids)
    if request.id in running:
        raise RequestError(f"a request with id {request.id!r} is already running", "give each request its own id")
    # Penalties apply from the first token on, so one look at its sampling shows all that a stage will check.
    of_sampling = sampling_faults(msgspec.structs.replace(sampling, history=()), limits)
    fault = next(chain(_request_faults(request, stop_ids, limits), of_sampling), None)
    if fault is not None:
        raise RequestError(fault, HINTS.get(fault, ""))
    new_tokens = 0 if request.pooling else params.max_tokens
    if prompt_length + new_tokens > limits.max_model_len:
        raise RequestError(
            f"{counted(prompt_length, 'prompt token')} and {new_tokens} new ones make "
            f"{prompt_length + new_tokens}; the context holds {limits.max_model_len}",
            "shorten the prompt or ask for fewer tokens",
            param="max_tokens",
        )
    max_cached_tokens = prompt_length + params.max_tokens - 1  # the last token is given out and never computed
    if -(-max_cached_tokens // limits.page_size) > limits.num_pages:
        raise RequestError(
            f"the request needs room for {counted(max_cached_tokens, 'token')}; the whole cache holds "
            f"{limits.num_pages * limits.page_size}",
            "give the cache more memory, or ask for fewer tokens",
            param="max_tokens",
        )


def check_batch(batch: Batch, limits: Limits) -> None:
    """Refuse a batch that points outside the cache or the vocabulary, or is larger than agreed."""
    fault = next(_batch_faults(batch, limits), None)
    if fault is not None:
        raise FrameError(f"batch {batch.number} cannot be computed: {fault}")


def check_results(results: Results, batch: Batch, limits: Limits) -> None:
    """Refuse results that are not of this batch."""
    fault = next(_result_faults(results, batch, limits), None)
    if fault is not None:
        raise FrameError(f"results of batch {results.number} cannot be taken: {fault}")


def _request_faults(request: Request, stop_ids: tuple[int, ...], limits: Limits) -> Iterator[str]:
    params, num_output = request.params, len(request.output_ids)
    if not request.prompt_ids:
        yield NO_TOKEN
    if request.cache_salt.startswith(LORA_SALT):
        yield f"its cache_salt begins with {LORA_SALT!r}, which stands for an adapter"
    for token_id in (*request.prompt_ids, *request.output_ids):
        if not 0 <= token_id < limits.vocab_size:
            yield f"token {token_id} is not in the vocabulary of {limits.vocab_size}"
    if params.max_tokens < 1:
        yield f"max_tokens {params.max_tokens} is not 1 or more"
    if num_output >= max(1, params.max_tokens):
        yield f"{num_output} tokens are given out already, of max_tokens {params.max_tokens}"
    if params.temperature > 0 and params.seed is None:
        yield "a sampled request needs a seed"
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        yield f"seed {params.seed} has more than 64 bits"
    for name, value in (("top_k", params.top_k), ("logprobs", params.logprobs), ("min_tokens", params.min_tokens)):
        if not 0 <= (value or 0) < 2**31:
            yield f"{name} {value} is not from 0 to {2**31 - 1}"
    if not 0 <= (params.prompt_logprobs or 0) <= MAX_LOGPROBS:
        yield f"prompt_logprobs {params.prompt_logprobs} is not 0 to {MAX_LOGPROBS}"
    if params.prompt_logprobs is not None and not num_output:
        nbytes = len(request.prompt_ids) * (LOGPROB_BYTES + LIKELY_BYTES * params.prompt_logprobs)
        if nbytes > MEMBER_BYTES:
            told = f"prompt_logprobs {params.prompt_logprobs} of {len(request.prompt_ids)} tokens"
            yield f"{told} may take {nbytes} bytes, and a message holds {MEMBER_BYTES}"
    if any(not 0 <= token_id < limits.vocab_size for token_id in (*params.stop_token_ids, *params.logit_bias)):
        yield f"a stop or biased token is not in the vocabulary of {limits.vocab_size}"
    yield from _head_faults(request, limits)
    scheduling = request.scheduling
    if not 0 < scheduling.weight < math.inf or not abs(scheduling.priority) < 2**31:
        yield f"weight {scheduling.weight} is not more than 0, or priority {scheduling.priority} has over 32 bits"
    if not 0 <= (scheduling.max_queue_seconds or 0) < math.inf:
        yield f"max_queue_seconds {scheduling.max_queue_seconds} is not a finite number of 0 or more"
    if params.min_tokens > 0 and params.grammar is None and len({*stop_ids}) == limits.vocab_size:
        yield f"min_tokens is {params.min_tokens}, and each of the {limits.vocab_size} tokens ends the reply"
    if len(stop_ids) > MAX_BANNED:
        yield f"{len(stop_ids)} stop tokens, those of the model among them, at most {MAX_BANNED}"


def _head_faults(request: Request, limits: Limits) -> Iterator[str]:
    """What the model has no head for: tokens of one that classifies, labels of one that writes."""
    pooling = request.pooling
    if pooling is None or pooling.kind == "logprobs":
        if limits.num_labels:
            head = f"a head of {counted(limits.num_labels, 'label')}"
            yield f"the model has {head} and none for tokens: it scores and cannot write"
        if limits.is_bidirectional:
            yield "each token of the model sees those after it (it is not causal): it embeds and cannot write"
        if limits.is_headless:
            yield "the model was saved without its head for tokens (lm_head.weight): it embeds and cannot write"
    elif pooling.kind == "score" and not limits.num_labels:
        yield "the model has no classification head (score.weight): it is no model for sequence classification"
    if pooling is not None:
        yield from _pooling_faults(pooling, limits)
        if request.params.prompt_logprobs is not None or request.params.max_tokens != 1:
            yield "a prompt that is pooled has max_tokens 1 and no prompt_logprobs"


def _pooling_faults(pooling: PoolingParams, limits: Limits) -> Iterator[str]:
    count = len(pooling.token_ids)
    if (count > 0) != (pooling.kind == "logprobs") or count > MAX_POOLED_LOGPROBS:
        yield f"{count} tokens for pooling {pooling.kind!r}; logprobs takes 1 to {MAX_POOLED_LOGPROBS}, the others none"
    if any(not 0 <= token_id < limits.vocab_size for token_id in pooling.token_ids):
        yield f"a pooled token is not in the vocabulary of {limits.vocab_size}"


def _batch_faults(batch: Batch, limits: Limits) -> Iterator[str]:
    entries, tokens = len(batch.entries), sum(entry.count for entry in batch.entries)
    if not 0 < entries <= limits.max_num_seqs:
        yield f"{entries} sequences, 1 to {limits.max_num_seqs} agreed"
    if tokens > limits.max_num_batched_tokens:
        yield f"{tokens} tokens, {limits.max_num_batched_tokens} agreed"
    if len(batch.token_ids) != tokens:
        yield f"{len(batch.token_ids)} token ids for {tokens} places"
    if len({entry.key for entry in batch.entries}) != entries:
        yield "one sequence comes twice"
    if limits.num_state_slots and len({entry.state_slot for entry in batch.entries}) != entries:
        yield "two sequences have one slot for their states"
    yield from _id_faults(batch.token_ids, limits.vocab_size)
    for entry in batch.entries:
        yield from _entry_faults(entry, limits)


def _entry_faults(entry: BatchEntry, limits: Limits) -> Iterator[str]:
    if entry.count < 1:
        yield f"sequence {entry.key} has no token"
    if entry.stop > limits.max_model_len:
        yield f"sequence {entry.key} has {entry.stop} tokens, the context {limits.max_model_len}"
    pages = 0
    for first, count in entry.page_table:
        if count < 1 or first + count > limits.num_pages:
            yield f"pages [{first}, {first + count}) of {limits.num_pages}"
        pages += count
    if pages * limits.page_size < entry.stop:
        yield f"sequence {entry.key} has {pages} pages of {limits.page_size} for {entry.stop} tokens"
    if entry.state_slot >= max(1, limits.num_state_slots):
        yield f"sequence {entry.key} has its states in slot {entry.state_slot} of {limits.num_state_slots}"
    if len(entry.targets) > entry.count:
        yield f"{len(entry.targets)} targets for {entry.count} tokens"
    drafted = entry.num_draft_tokens
    most = limits.max_draft_tokens if entry.masks else limits.num_speculative_tokens
    if drafted > most:
        yield f"sequence {entry.key} has {drafted} drafted tokens, {most} agreed"
    if entry.masks and len(entry.masks) != entry.num_sampled:
        yield f"sequence {entry.key} has {len(entry.masks)} masks for {entry.num_sampled} tokens"
    if any(len(mask) > limits.mask_bytes for mask in entry.masks):
        yield f"a mask of {max(map(len, entry.masks))} bytes, at most {limits.mask_bytes}"
    if drafted >= entry.count or (drafted and entry.sampling is None):
        yield f"sequence {entry.key} has {drafted} drafted tokens of {entry.count}, and none to choose"
    if entry.prompt_top > MAX_LOGPROBS:
        yield f"prompt_logprobs {entry.prompt_top}, at most {MAX_LOGPROBS}"
    if entry.pooling is not None:
        yield from _pooling_faults(entry.pooling, limits)
        if entry.sampling is not None:
            yield f"sequence {entry.key} is pooled and a token is to be chosen"
    yield from _id_faults(entry.targets, limits.vocab_size)
    if entry.sampling is not None and not entry.sampling.is_plain_greedy:
        yield from sampling_faults(entry.sampling, limits)


def sampling_faults(sampling: Sampling, limits: Limits) -> Iterator[str]:
    """What in a sampling cannot be done, in words for whoever sent the request."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values())
    largest = max(penalties, key=lambda value: abs(value) if value == value else math.inf)
    if not abs(largest) <= MAX_PENALTY:
        yield f"a penalty or bias of {largest:g}, at most {MAX_PENALTY:g} either way"
    if not 0 <= sampling.temperature < math.inf:
        yield f"temperature {sampling.temperature} is not a finite number of 0 or more"
    if sampling.tempered_logprobs and sampling.temperature == 0:
        yield "log-probabilities at a temperature of 0 are asked for"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p {sampling.top_p} is not in (0, 1]"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p {sampling.min_p} is not in [0, 1]"
    if not 1 / MAX_PENALTY <= sampling.repetition_penalty <= MAX_PENALTY:
        yield f"repetition_penalty {sampling.repetition_penalty:g} is not from {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}"
    for name, have, most in (
        ("logprobs", sampling.logprobs or 0, MAX_LOGPROBS),
        ("biased tokens", len(sampling.logit_bias), MAX_BIASED),
        ("stop tokens", len(sampling.banned), MAX_BANNED),
        ("tokens of history", len(sampling.history), limits.max_model_len),
    ):
        if have > most:
            yield f"{have} {name}, at most {most}"
    for ids in (tuple(sampling.logit_bias), sampling.banned, sampling.history):
        yield from _id_faults(ids, limits.vocab_size)


def _id_faults(ids: tuple[int, ...], vocab_size: int) -> Iterator[str]:
    if ids and max(ids) >= vocab_size:
        yield f"token {max(ids)} of a vocabulary of {vocab_size}"


def _result_faults(results: Results, batch: Batch, limits: Limits) -> Iterator[str]:
    sampled = sum(entry.num_sampled for entry in batch.entries)
    wanted = [len(entry.targets) for entry in batch.entries if entry.targets]
    given = [len(logprobs) for logprobs in results.prompt_logprobs]
    if results.number != batch.number:
        yield f"batch {batch.number} was next"
    if len(results.token_ids) != sampled or len(results.logprobs) not in (0, sampled):
        yield f"{len(results.token_ids)} tokens with {len(results.logprobs)} log-probabilities, {sampled} to be chosen"
    if given != wanted:
        yield f"prompt log-probabilities for {given} tokens, not {wanted}"
    pooled = [entry.pooling for entry in batch.entries if entry.pooling]
    widths = [pooled_width(pooling, limits) for pooling in pooled]
    if [len(values) for values in results.pooled] != widths:
        yield f"pooled prompts of {[len(values) for values in results.pooled]} numbers, not {widths}"
    yield from _id_faults(results.token_ids, limits.vocab_size + 1)  # the size itself: a token could not be drawn


def pooled_width(pooling: PoolingParams, limits: Limits) -> int:
    """How many numbers a chunk of a prompt comes to."""
    widths = {"last": limits.hidden_size, "mean": 2 * limits.hidden_size, "score": limits.num_labels}
    return widths.get(pooling.kind, len(pooling.token_ids))


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the engine. What is left out follows from the model.

    `cache_tokens` are the tokens that all sequences together may have in the cache; `cache_bytes` says the same as
    memory of the rank that needs most; with neither, the planner decides. A batch has `max_num_batched_tokens` tokens,
    by default 1,024, and as many as the longest prompt where the model sees both ways. `dtype` "" is the checkpoint's.
    `quantize` rounds plain weights to few bits while they are loaded; with `dequantize` weights that the files keep in
    few bits are held as plain numbers. `num_speculative_tokens` is the most draft tokens of one sequence that a batch
    checks, 0 for none; a `speculative_config` says it instead, and may name a draft model. `enable_prefix_caching` lets
    prompts that begin alike share pages, but not where a token's keys depend on the length of its sequence (dynamic
    rope), nor where layers have a state (gated delta nets), of which no page tells. `kv_cache_dtype` holds keys and
    values in one byte each. With a `cache_dir` pages are kept in that folder too, `cache_dir_size` bytes of them at
    most.

    Two options matter only where ranks are processes: `narrow_wire` says how hidden states are compressed between
    stages, `wiring` what kind of link carries tensors between ranks.
    """

    dtype: str = ""
    quantize: Quantize | None = None
    dequantize: bool = False
    max_model_len: int | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    page_size: int = PAGE_SIZE
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    num_speculative_tokens: int = 0
    speculative_config: SpeculativeConfig | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    cache_dir: str = ""
    cache_dir_size: int = CACHE_DIR_BYTES
    narrow_wire: Narrowing = "off"
    wiring: Wiring = OUR_LINKS

    @property
    def draft_tokens(self) -> int:
        """The most draft tokens of one sequence that a batch checks."""
        drafts = self.speculative_config
        return self.num_speculative_tokens if drafts is None else drafts.num_speculative_tokens

    def check(self) -> None:
        """ConfigError for what is out of range with any model and plan; `limits_of` looks at the rest."""
        check_counts(page_size=self.page_size, max_num_seqs=self.max_num_seqs, cache_dir_size=self.cache_dir_size)
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.narrow_wire not in get_args(Narrowing):
            raise ConfigError(f"narrow_wire is {self.narrow_wire!r}", f"give one of {', '.join(get_args(Narrowing))}")
        if self.speculative_config is not None:
            read_speculative_config(self.speculative_config)


def limits_of(spec: ModelSpec, plan: Plan, config: EngineConfig) -> Limits:
    """The sizes that every rank agrees on. Raises CapacityError where the cache cannot hold what was asked for."""
    config.check()
    plan.check_serving()
    max_model_len = context_of(spec, config.max_model_len)
    asked = config.max_num_batched_tokens
    batched = batch_tokens(spec, max_model_len) if asked is None else asked
    if spec.bidirectional and max_model_len > batched:
        max_model_len = _whole_in_a_batch(config.max_model_len, batched)
    elif config.max_model_len is None and max_model_len < spec.max_model_len:
        text = (
            "the context is %d of %d tokens, as the model computes all of a prompt at once: --max-model-len can be more"
        )
        log.info(text, max_model_len, spec.max_model_len)
    num_pages = _num_pages(spec, plan, config, max_model_len)
    cached = num_pages * config.page_size
    if config.max_model_len is not None and max_model_len > cached:
        raise CapacityError(
            f"the cache holds {cached} tokens and max_model_len is {max_model_len}",
            "give the cache more memory, or ask for a shorter context",
        )
    why_no_prefixes = (spec.delta and "gated delta nets of %s have a state, which pages do not hold") or (
        spec.bidirectional and "what a page of %s holds depends on all tokens of its prompt"
    )
    if config.enable_prefix_caching and why_no_prefixes:
        log.info(f"prefix caching is off: {why_no_prefixes}", spec.family)
    limits = Limits(
        num_pages=num_pages,
        vocab_size=spec.vocab_size,
        max_model_len=min(max_model_len, cached),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched,
        num_speculative_tokens=config.draft_tokens,
        enable_prefix_caching=config.enable_prefix_caching and not spec.scales_by_length and not why_no_prefixes,
        num_state_slots=config.max_num_seqs if spec.delta else 0,
        hidden_size=spec.hidden_size,
        num_labels=spec.num_labels,
        is_headless=spec.is_headless,
        is_bidirectional=spec.bidirectional,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    limits.check()
    return limits


def _whole_in_a_batch(asked: int | None, most: int) -> int:
    """The context of a model that computes all of a prompt at once; ConfigError where more was asked for."""
    if asked is not None:
        raise ConfigError(
            f"max_model_len is {asked} and a batch has {most} tokens: a model that sees both ways computes all of a "
            "prompt at once",
            f"leave max_num_batched_tokens out, or give at least {asked}",
        )
    log.info("the context is %d tokens: a model that sees both ways computes all of a prompt in one batch", most)
    return most


def _num_pages(spec: ModelSpec, plan: Plan, config: EngineConfig, max_model_len: int) -> int:
    if config.cache_tokens is None:
        ranks = rank_bytes(spec, plan, config.dtype or spec.dtype, config.kv_cache_dtype)
        return cache_pages(ranks, config.page_size, max_model_len, config.max_num_seqs, config.cache_bytes)
    if config.cache_bytes is not None:
        raise ConfigError("the cache is given both in tokens and in bytes", "give one of them")
    if config.cache_tokens < config.page_size:
        raise CapacityError(
            f"a cache of {config.cache_tokens} tokens holds no page of {config.page_size}", "give the cache more"
        )
    return config.cache_tokens // config.page_size
