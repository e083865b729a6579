"""Which ways to compute are the fastest on this machine for the shapes of large models, with the times of all of them.

They are chosen as those of a running model are, and kept in the same file; only what is not known there is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tllm.core.errors import counted
from tllm.engine.compute import attention_choice
from tllm.engine.compute.attention_choice import AttentionKind
from tllm.engine.compute.kernel_attention import KernelAttention
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.segmented_attention import SegmentedAttention
from tllm.engine.schedule.batch import BatchEntry
from tllm.engine.schedule.limits import Limits
from tllm.kernels import float_product
from tllm.kernels.autotune import choice_file, in_words
from tllm.kernels.fastest import Choice, fastest
from tllm.kernels.library import library
from tllm.kernels.training.training_matmul import PASSES, TRAINED_IN_16_BITS, PassKind, choose_pass
from tllm.model.attention import AttentionSpec, first_heads
from tllm.planner.cluster.profile import ShapeChoice
from tllm.training.attention import kernel_attention
from tllm.training.attention.attention_dtype import TrainedAttentionKind, choose_attention
from tllm.training.attention.kernel_attention import KernelAttentionKind, choose_way, has_kernel

HEADS, KV_HEADS, WIDTH = 32, 8, 128
"""Of the attention that is timed: those of Llama 3 with 8 billion parameters."""

PAGE_SIZE, KEYS = 16, 512
PROMPTS = ((0, 64), (0, 512), (448, 64))
"""The first position of a piece of a prompt, and its tokens."""

TRAINED_WIDTH = 1024

DTYPES = (torch.float32, torch.bfloat16)


def autotuned_shapes() -> tuple[ShapeChoice, ...]:
    """Products of the shapes that this process has measured, and attention and training of shapes of our own."""
    found = [_shape(float_product.choices.area, kind, one) for kind, one in float_product.choices.known.items()]
    with torch.inference_mode():
        for dtype in DTYPES:
            found += attention_of_prompts(dtype)
            found.append(attention_of_single_tokens(dtype))
    for dtype in TRAINED_IN_16_BITS:
        found += training(dtype)
    return tuple(found)


def kept_in() -> str:
    """The file that choices are kept in, and how many it has; "" where none are kept."""
    file = choice_file()
    if file is None:
        return ""
    kept = counted(file.count(), "choice of this machine is", "choices of this machine are")
    return f"{kept} kept in {file.path}"


def attention_of_prompts(dtype: torch.dtype) -> Iterator[ShapeChoice]:
    """Pieces of prompts, which are computed in whichever way is faster; nothing where there is only one."""
    cache, known = _cache(dtype), attention_choice.choices
    for start, count in PROMPTS:
        entries = (_entry(start, count),)
        q_TNH = _any(count, HEADS, dtype)
        PagedAttend(cache, entries)(0, q_TNH, *(_any(count, KV_HEADS, dtype) for _ in range(2)))
        kind = AttentionKind.of(cache.kinds[0], entries, q_TNH, KV_HEADS)
        if kind in known.known:
            yield _shape(known.area, kind, known.known[kind])


def attention_of_single_tokens(dtype: torch.dtype) -> ShapeChoice:
    """A token of a reply: always by the kernel, where there is one, so that its bits do not depend on the machine."""
    cache, kernels, entries = _cache(dtype), library(), (_entry(KEYS - 1, 1),)
    (spec,) = cache.kinds
    rows = [_any(1, heads, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    ways: dict[str, Any] = {"torch": SegmentedAttention(cache, spec, entries)}
    if kernels is not None:
        firsts = first_heads(spec, HEADS, KV_HEADS)
        ways["kernel"] = KernelAttention(kernels, cache, spec, entries, firsts)
    choice = fastest({name: partial(way, cache.layers[0], *rows) for name, way in ways.items()})
    kind = AttentionKind.of(spec, entries, rows[0], KV_HEADS)
    return _shape("attention of a token", kind, choice._replace(name="torch" if kernels is None else "kernel"))


def training(dtype: torch.dtype) -> Iterator[ShapeChoice]:
    """Each pass of a product of training, and its attention."""
    threads = torch.get_num_threads()
    for name in PASSES:
        kind = PassKind(TRAINED_WIDTH, TRAINED_WIDTH, dtype, threads, name)
        yield _shape("product of training", kind, choose_pass(kind))
    yield _shape("attention of training", TrainedAttentionKind(dtype, threads), choose_attention(dtype))
    if has_kernel(dtype):
        yield _shape(kernel_attention.choices.area, KernelAttentionKind(dtype, threads), choose_way(dtype))


def _shape(area: str, kind: tuple[Any, ...], choice: Choice) -> ShapeChoice:
    return ShapeChoice(area, in_words(kind), choice.name, choice.seconds)


def _cache(dtype: torch.dtype) -> KVCache:
    sizes = Limits(num_pages=KEYS // PAGE_SIZE, vocab_size=1, max_model_len=KEYS, page_size=PAGE_SIZE)
    spec = AttentionSpec(scale=WIDTH**-0.5, kv_shape=(KV_HEADS, WIDTH))
    return KVCache({0: spec}, sizes, dtype)


def _entry(start: int, count: int) -> BatchEntry:
    return BatchEntry(0, start, count, start + count, ((0, KEYS // PAGE_SIZE),))


def _any(rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Numbers of ordinary size: products of zeros or denormal numbers take another time."""
    return torch.linspace(-1, 1, rows * heads * WIDTH + 1)[:-1].view(rows, heads, WIDTH).to(dtype)
