"""Memory of a serving rank: pages of the key-value cache, and what a process takes besides them and the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tllm.core.errors import CapacityError, ConfigError
from tllm.core.memory import amount
from tllm.planner.cost.rank_bytes import ITEM_BYTES, RankBytes, state_bytes
from tllm.spec.cut import as_layer, size
from tllm.spec.model_spec import ModelSpec

PAGE_SIZE = 16
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 1024
"""Defaults: tokens in a page, sequences at once, and tokens in a batch."""

LONGEST_BOTH_WAYS = 8192
"""Default context of a model that sees both ways, if its own is longer: memory for a whole prompt at once is needed."""

CACHE_DIR_BYTES = 32 << 30
"""Default bytes of pages that are kept on disk, where they are."""

DEFAULT_CACHE_BYTES = 1 << 30
"""Default bytes of the key-value cache on each rank."""


RUNTIME_BYTES = 290 * 2**20
"""Bytes of a worker before any weight: Python, torch, and what their allocators and kernels keep (measured; see
docs/log/memory.md)."""

AT_REST_BYTES = 210 * 2**20
"""The most of these that a worker has touched when it has loaded the torch for processors and does nothing yet (180 to
199 MiB were seen). Builds that drive GPUs touch more, whatever they then compute on: nodes measure it, and take the
rest from what they were given."""


ROWS_AT_ONCE = 64
"""Rows whose logits over the vocabulary are in memory at a time."""


def check_counts(**numbers: int | None) -> None:
    """ConfigError for a number of 0 or less, by its name; None is for one that follows from the model or machine."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}, and must be 1 at least", "give 1 or more")


def context_of(spec: ModelSpec, asked: int | None) -> int:
    """Tokens of the longest sequence: what is asked for, or else the model's own context. ConfigError for more than
    that, or none."""
    if asked is not None and not 0 < asked <= spec.max_model_len:
        how = "more than" if asked > 0 else "not within"
        raise ConfigError(
            f"max_model_len {asked} is {how} the model's context of {spec.max_model_len}",
            f"give 1 to {spec.max_model_len}",
        )
    most = min(spec.max_model_len, LONGEST_BOTH_WAYS) if spec.bidirectional else spec.max_model_len
    return most if asked is None else asked


def batch_tokens(spec: ModelSpec, max_model_len: int) -> int:
    """Tokens in a batch, by default. A model that sees both ways computes all of a prompt in one."""
    return max(MAX_NUM_BATCHED_TOKENS, max_model_len) if spec.bidirectional else MAX_NUM_BATCHED_TOKENS


def working_bytes(spec: ModelSpec, rank: RankBytes, dtype: str, tokens: int, sequences: int) -> int:
    """Bytes at most that a batch of `tokens` of so many sequences takes: one layer's activations, and logits at the
    end. The states of these sequences, in layers that have some, are counted here too, as is who sees whom where all of
    a prompt is computed at once and not all tokens see each other."""
    item, D = ITEM_BYTES[dtype], spec.hidden_size
    width = max((size(as_layer(spec, spec.layers[n], rank.cut)[1].width) for n in rank.layers), default=0)
    wide = 8 * D if item < 4 else 0  # norms of 16-bit values are worked out in float32
    latents = 3 * size(rank.cut.heads) * spec.head_dim if spec.latent else 0  # queries, and what attention gives
    inputs = 2 * len(rank.layers) * spec.per_layer_width  # the layers' own, and what they are made of
    beside = spec.carried_width(rank.layers.stop) - D if rank.layers.stop < spec.num_layers else 0
    layer = tokens * (item * (4 * (D + width) + latents + inputs + 2 * beside) + wide)
    ends = rank.layers.stop == spec.num_layers
    logits = 2 * 4 * min(sequences, ROWS_AT_ONCE) * (rank.cut.vocab[1] - rank.cut.vocab[0]) if ends else 0
    is_masked = spec.bidirectional and any(spec.layers[number].window for number in rank.layers)
    mask = (item + 4) * tokens**2 if is_masked else 0  # of numbers, made of up to four of truth values
    return layer + logits + mask + sequences * state_bytes(spec, rank.layers, rank.cut, item)


def cache_pages(
    ranks: Sequence[RankBytes], page_size: int, max_model_len: int, max_num_seqs: int, memory: int | None = None
) -> int:
    """Pages that `memory` bytes hold on the rank whose tokens take most bytes.

    Without `memory`: room for every sequence at its longest, but DEFAULT_CACHE_BYTES at most. Raises CapacityError
    where not even one page has room."""
    page_bytes = max(1, *(rank.kv_per_token for rank in ranks)) * page_size
    budget = DEFAULT_CACHE_BYTES if memory is None else memory
    pages = budget // page_bytes
    if pages < 1:
        raise CapacityError(
            f"{amount(budget)} of cache hold no page: one of {page_size} tokens takes {amount(page_bytes)}",
            "give --kv-cache-memory more, or cut the model over more ranks",
        )
    most = max_num_seqs * -(-max_model_len // page_size)
    return min(pages, most) if memory is None else pages


def check_machines(needs: Sequence[int], machines: Sequence[tuple[str, int]]) -> None:
    """Raises CapacityError where the ranks of a machine, which need so many bytes each, take more than it has.

    `machines`: the name and bytes of memory of each rank's.
    """
    sums = Counter[tuple[str, int]]()
    for need, machine in zip(needs, machines, strict=True):
        sums[machine] += need
    for (name, memory), need in sums.items():
        if need > memory:
            raise CapacityError(
                f"the ranks on {name} need {amount(need)} and it has {amount(memory)}, "
                f"{amount(need - memory)} too little",
                "let more machines join, or give more memory",
            )
