"""What the ranks of a replica agree on before the first batch, and the checks that keep every batch within it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from tllm.engine.batch import Batch, Entry, Results, Sampling
from tllm.ground.errors import ConfigError, FrameError

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
