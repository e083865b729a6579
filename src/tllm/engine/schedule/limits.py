"""What the ranks of a replica agree on before the first batch, and the checks that keep every batch within it.

What the user may say about the engine's sizes, and the `Limits` that follow for a model and a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from tllm.cluster.settings import OUR_LINKS, Narrowing, Wiring
from tllm.core.errors import CapacityError, ConfigError, FrameError
from tllm.engine.schedule.batch import Batch, Entry, Results, Sampling
from tllm.planner.cost.cache_room import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PAGE_SIZE, cache_pages
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

MAX_LOGPROBS = 20
MAX_BIASED = 1024
MAX_BANNED = 256


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that every rank of a replica shares: of the cache, the model and a batch.

    `num_speculative_tokens`: that a batch checks of one sequence at the most, beside those it computes anyway.
    """

    num_pages: int
    vocab_size: int
    max_model_len: int
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    num_speculative_tokens: int = 0

    def check(self) -> None:
        """Refuse sizes with which no batch could be made."""
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"batches of {self.max_num_batched_tokens} tokens leave no room for prompts beside "
                f"{self.max_num_seqs} sequences",
                f"let a batch have more than {self.max_num_seqs} tokens, or run fewer sequences at once",
            )
        room = self.max_num_batched_tokens - self.max_num_seqs
        if not 0 <= self.num_speculative_tokens <= room:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and batches of "
                f"{self.max_num_batched_tokens} tokens have room for {room} beside {self.max_num_seqs} sequences",
                "4 to 16 are usual; 0 for none",
            )

    @property
    def batch_bytes(self) -> int:
        """No honest batch takes more: some bytes a token and page, and each sequence's sampling with its history."""
        per_sequence = 1024 + 16 * self.max_model_len + 32 * MAX_BIASED + 8 * MAX_BANNED
        return 4096 + 16 * self.max_num_batched_tokens + self.max_num_seqs * per_sequence

    @property
    def results_bytes(self) -> int:
        """No honest results take more: each token of a batch with its likeliest ones."""
        return 4096 + (self.max_num_seqs + self.max_num_batched_tokens) * (64 + 32 * (MAX_LOGPROBS + 1))


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
    yield from _id_faults(batch.token_ids, limits.vocab_size)
    for entry in batch.entries:
        yield from _entry_faults(entry, limits)


def _entry_faults(entry: Entry, limits: Limits) -> Iterator[str]:
    if entry.count < 1:
        yield f"sequence {entry.key} has no token"
    if entry.stop > limits.max_model_len:
        yield f"sequence {entry.key} has {entry.stop} tokens, the context {limits.max_model_len}"
    pages = 0
    for first, count in entry.table:
        if count < 1 or first + count > limits.num_pages:
            yield f"pages [{first}, {first + count}) of {limits.num_pages}"
        pages += count
    if pages * limits.page_size < entry.stop:
        yield f"sequence {entry.key} has {pages} pages of {limits.page_size} for {entry.stop} tokens"
    if len(entry.targets) > entry.count:
        yield f"{len(entry.targets)} targets for {entry.count} tokens"
    if entry.drafted > limits.num_speculative_tokens:
        yield f"sequence {entry.key} has {entry.drafted} drafted tokens, {limits.num_speculative_tokens} agreed"
    if entry.drafted >= entry.count or (entry.drafted and entry.sampling is None):
        yield f"sequence {entry.key} has {entry.drafted} drafted tokens of {entry.count}, and none to choose"
    if entry.prompt_top > MAX_LOGPROBS:
        yield f"prompt_logprobs {entry.prompt_top}, at most {MAX_LOGPROBS}"
    yield from _id_faults(entry.targets, limits.vocab_size)
    if entry.sampling is not None and not entry.sampling.plain:
        yield from sampling_faults(entry.sampling, limits)


def sampling_faults(sampling: Sampling, limits: Limits) -> Iterator[str]:
    """What in a sampling cannot be done, in words for the one who asked."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values())
    if not all(map(math.isfinite, penalties)):
        yield "a penalty or bias is not a finite number"
    if not 0 <= sampling.temperature < math.inf:
        yield f"temperature {sampling.temperature} is not 0 or more"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p {sampling.top_p} is not in (0, 1]"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p {sampling.min_p} is not in [0, 1]"
    if not 0 < sampling.repetition_penalty < math.inf:
        yield f"repetition_penalty {sampling.repetition_penalty} is not more than 0"
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
    chosen = sum(entry.chosen for entry in batch.entries)
    scored = [len(entry.targets) for entry in batch.entries if entry.targets]
    if results.number != batch.number:
        yield f"batch {batch.number} was next"
    if len(results.token_ids) != chosen or len(results.logprobs) not in (0, chosen):
        yield f"{len(results.token_ids)} tokens with {len(results.logprobs)} log-probabilities, {chosen} to be chosen"
    if [len(one) for one in results.prompt_logprobs] != scored:
        yield f"prompt log-probabilities for {[len(one) for one in results.prompt_logprobs]} tokens, not {scored}"
    yield from _id_faults(results.token_ids, limits.vocab_size)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the engine. What is left out follows from the model.

    `cache_tokens` are the tokens that all sequences together may have in the cache; `cache_bytes` says the same as
    memory of the rank that needs most, and with neither the planner's own figure holds. `dtype` "" is the checkpoint's.
    `num_speculative_tokens`: drafted tokens of one sequence that a batch checks at the most, 0 for none.
    `narrow_wire` is how hidden states travel between stages that are processes, `wiring` what carries the wires between
    all ranks that are: within one process, nothing travels.
    """

    dtype: str = ""
    max_model_len: int | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    page_size: int = PAGE_SIZE
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    num_speculative_tokens: int = 0
    narrow_wire: Narrowing = "off"
    wiring: Wiring = OUR_LINKS


def limits_of(spec: ModelSpec, plan: Plan, config: EngineConfig) -> Limits:
    """The sizes that every rank agrees on. Raises CapacityError where the cache cannot hold what was asked for."""
    plan.check_serving()
    longest = spec.max_model_len if config.max_model_len is None else config.max_model_len
    if not 0 < longest <= spec.max_model_len:
        raise ConfigError(
            f"max_model_len {longest} is not within the model's context of {spec.max_model_len}",
            f"give 1 to {spec.max_model_len}",
        )
    num_pages = _num_pages(spec, plan, config, longest)
    held = num_pages * config.page_size
    if config.max_model_len is not None and longest > held:
        raise CapacityError(
            f"the cache holds {held} tokens and max_model_len is {longest}",
            "give the cache more memory, or ask for a shorter context",
        )
    limits = Limits(
        num_pages=num_pages,
        vocab_size=spec.vocab_size,
        max_model_len=min(longest, held),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=config.num_speculative_tokens,
    )
    limits.check()
    return limits


def _num_pages(spec: ModelSpec, plan: Plan, config: EngineConfig, longest: int) -> int:
    if config.cache_tokens is None:
        ranks = rank_bytes(spec, plan, config.dtype or spec.dtype)
        return cache_pages(ranks, config.page_size, longest, config.max_num_seqs, config.cache_bytes)
    if config.cache_bytes is not None:
        raise ConfigError("the cache is given both in tokens and in bytes", "give one of them")
    if config.cache_tokens < config.page_size:
        raise CapacityError(
            f"a cache of {config.cache_tokens} tokens holds no page of {config.page_size}", "give the cache more"
        )
    return config.cache_tokens // config.page_size
