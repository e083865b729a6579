"""What the user may say about the engine's sizes, and the `Limits` that follow for a model and a plan."""

from __future__ import annotations

import msgspec

from tllm.cluster.settings import OUR_LINKS, Narrowing, Wiring
from tllm.engine.limits import Limits
from tllm.ground.errors import CapacityError, ConfigError
from tllm.planner.cost import rank_bytes
from tllm.planner.room import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PAGE_SIZE, cache_pages
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan


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
