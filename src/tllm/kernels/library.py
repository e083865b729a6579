"""The compiled kernels: found, loaded once for the best instruction set that the processor has, and given threads.

They take memory addresses, so a wheel of them fits every version of Python and torch. Their threads are torch's own:
they fork through the OpenMP library that torch has loaded, so there is one team on the cores.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.core.errors import ConfigError
from tllm.kernels.instruction_sets import FOLDER, InstructionSet, supported

log = logging.getLogger("tllm.kernels")

CHOICE = "TLLM_KERNELS"
"""The environment's name of the instruction set to use instead of the best one, or `off` for none."""

DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int8: 4, torch.float64: 5}
"""The kernels' numbers of the dtypes, as in csrc/vectors.h."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the rows that kernels take."""

LANES = 16
"""Numbers of one vector of the kernels, as in csrc/vectors.h, and outputs of a block of a packed weight."""

FLOAT8 = 6
"""The kernels' number of e4m3, which is held in bytes."""

EXPONENT = 7
"""The kernels' number of powers of two, which are held as their exponents and 128, in bytes."""

MOST_WORDS = 12
"""Arguments of a kernel in a recording that are addresses or whole numbers, at the most."""


class PackedWeightArguments(ctypes.Structure):
    """`PackedWeight` of csrc/packed_weight.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "super_scales", "minima", "super_minima")),
        *((name, c_int64) for name in ("outputs", "columns", "padded", "group", "super_group")),
        *((name, ctypes.c_int32) for name in ("kind", "offset", "scale_dtype", "super_dtype")),
        ("table", ctypes.c_uint8 * 16),
    )


class WeightPartArguments(ctypes.Structure):
    """`WeightPart` of csrc/quantized_matmul.c."""

    _fields_ = (("weight", PackedWeightArguments), ("expert", c_int64), ("first_output", c_int64))


class AttentionArguments(ctypes.Structure):
    """`Attention` of csrc/attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "key_scales", "value_scales", "sinks", "out")),
        *((name, c_void_p) for name in ("runs", "first_run", "first_token", "first_key", "num_keys", "first_head")),
        ("scores", c_void_p),
        *((name, c_int64) for name in ("tiles", "q_stride", "heads", "kv_heads", "width", "slots")),
        *((name, c_int64) for name in ("most_keys", "most_rows")),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class CausalAttentionArguments(ctypes.Structure):
    """`CausalAttention` of csrc/causal_attention.c."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("q", "keys", "values", "out", "log_sums", "d_out", "d_q", "d_keys", "d_values")
        ),
        *((name, c_void_p) for name in ("first_token", "scratch")),
        *((name, c_int64) for name in ("documents", "tokens", "longest", "heads", "kv_heads", "width")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", "window")),
        ("dtype", ctypes.c_int32),
        ("scale", c_float),
    )


class CacheRowsArguments(ctypes.Structure):
    """`CacheRows` of csrc/cache_codes.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "places", "codes", "scales")),
        *((name, c_int64) for name in ("rows", "stride", "heads", "width", "slots")),
        *((name, ctypes.c_int32) for name in ("dtype", "coding")),
    )


class SharedSumArguments(ctypes.Structure):
    """`SharedSum` of csrc/shared_sum.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("arrivals", "places")),
        *((name, c_int64) for name in ("rank", "ranks", "place_bytes")),
        *((name, c_int64) for name in ("number", "summed", "has_come", "spin", "taken")),
    )


class DrawArguments(ctypes.Structure):
    """`Draws` of csrc/gumbel_max.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperatures", "least", "top_p", "seeds", "positions")),
        *((name, c_void_p) for name in ("scratch", "ids")),
        *((name, c_int64) for name in ("rows", "width", "stride")),
    )


class CallArguments(ctypes.Structure):
    """`Call` of csrc/recorded_calls.c."""

    _fields_ = (("kernel", c_int64), ("words", c_int64 * MOST_WORDS), ("number", c_double))


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tllm_set_threads": (None, [c_void_p] * 3),
    "tllm_has_tiles": (c_int, []),
    "tllm_scratch_bytes": (c_int64, [c_int64] * 2),
    "tllm_quantized_matmul": (
        None,
        [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int64, c_int, c_void_p, c_int, c_int],
    ),
    "tllm_float_matmul": (
        None,
        [c_void_p, c_int, c_int64, c_int64, c_void_p, c_int, c_int64, c_void_p, c_int, c_void_p, c_int, c_int],
    ),
    "tllm_float_gradient_scratch": (c_int64, [c_int64, c_int64, c_int]),
    "tllm_float_gradient": (None, [c_void_p, c_void_p, *[c_int64] * 3, c_int, c_void_p, c_void_p, c_int]),
    "tllm_bfloat16_scratch_bytes": (c_int64, [c_int64, c_int64, c_int]),
    "tllm_bfloat16_matmul": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int]),
    "tllm_pack_codes": (None, [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_int]),
    "tllm_split_nibbles": (None, [c_void_p, *[c_int64] * 4, c_void_p, c_int]),
    "tllm_round_weights": (None, [c_void_p, c_int, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int]),
    "tllm_rms_norm": (
        None,
        [c_void_p, c_int, c_int64, c_int64, c_void_p, c_int, c_float, c_int, c_void_p, c_int],
    ),
    "tllm_rms_norm_kept": (
        None,
        [c_void_p, c_int, c_int64, c_int64, c_void_p, c_int, c_float, c_int, c_void_p, c_void_p, c_int],
    ),
    "tllm_rms_norm_backward": (
        None,
        [c_void_p, c_int, c_int64, c_int64, c_void_p, c_int, c_int, *[c_void_p] * 5, c_int],
    ),
    "tllm_gated": (None, [c_void_p, c_int, c_int64, c_int64, c_int, c_void_p, c_int]),
    "tllm_gated_backward": (None, [c_void_p, c_int, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int]),
    "tllm_clamped_swiglu": (None, [c_void_p, c_int, c_int64, c_int64, c_float, c_float, c_void_p, c_int]),
    "tllm_router_matmul": (
        None,
        [c_void_p, c_int, c_int64, c_int64, c_void_p, c_int, c_int64, c_void_p, c_int],
    ),
    "tllm_router_scores": (None, [c_void_p, c_int64, c_int64, c_int, c_void_p]),
    "tllm_rotate": (None, [c_void_p, c_int, *[c_int64] * 5, c_void_p, c_void_p]),
    "tllm_rotate_rows": (None, [c_void_p, c_int, *[c_int64] * 5, c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "tllm_add": (None, [c_void_p, c_void_p, c_int, *[c_int64] * 3, c_void_p]),
    "tllm_scale": (None, [c_void_p, c_int, c_int64, c_float, c_void_p]),
    "tllm_convert": (None, [c_void_p, c_int, c_int64, c_void_p, c_int]),
    "tllm_copy_rows": (None, [c_void_p, *[c_int64] * 5, c_void_p]),
    "tllm_paged_attention": (None, [POINTER(AttentionArguments), c_int]),
    "tllm_tiled_attention_scratch_bytes": (c_int64, [c_int]),
    "tllm_tiled_attention": (None, [POINTER(AttentionArguments), c_int]),
    "tllm_causal_attention_scratch_bytes": (c_int64, [c_int64, c_int64, c_int, c_int, c_int]),
    "tllm_causal_attention": (None, [POINTER(CausalAttentionArguments), c_int]),
    "tllm_write_codes": (None, [POINTER(CacheRowsArguments), c_int]),
    "tllm_shared_sum": (c_int, [c_void_p, c_void_p, c_int64, c_int]),
    "tllm_play": (c_int64, [POINTER(CallArguments), c_int64]),
    "tllm_gumbel_max": (None, [c_void_p, c_int]),
}


class QuantizedFunctions(NamedTuple):
    """The product with weights of few bits."""

    matmul: Callable[..., None]
    scratch_bytes: Callable[..., int]


class TileFunctions(NamedTuple):
    """The product with plain weights and attention by tiles, of processors that have those (`Library.has_tiles`)."""

    bfloat16_matmul: Callable[..., None]
    scratch_bytes: Callable[..., int]
    attention: Callable[..., None]
    attention_scratch_bytes: Callable[..., int]


class CacheFunctions(NamedTuple):
    """What reads the KV cache, and what writes it in codes."""

    paged_attention: Callable[..., None]
    write_codes: Callable[..., None]


class TrainingFunctions(NamedTuple):
    """Attention of training, forward and backward, and what products of float32 have of gradients."""

    attend: Callable[..., None]
    attention_scratch_bytes: Callable[..., int]
    float_gradient: Callable[..., None]
    float_gradient_scratch: Callable[..., int]


class LoadingFunctions(NamedTuple):
    """What brings weights of few bits into the order in memory that products want, and rounds plain ones."""

    pack_codes: Callable[..., None]
    split_nibbles: Callable[..., None]
    round_weights: Callable[..., None]


class ExpertFunctions(NamedTuple):
    """What experts have of their own: a router's product and scores, and an activation."""

    router_matmul: Callable[..., None]
    router_scores: Callable[..., None]
    clamped_swiglu: Callable[..., None]


class RowFunctions(NamedTuple):
    """The small operations of every layer, and what training has of them."""

    rms_norm: Callable[..., None]
    gated: Callable[..., None]
    rotate: Callable[..., None]
    gated_backward: Callable[..., None]
    rms_norm_kept: Callable[..., None]
    rms_norm_backward: Callable[..., None]
    rotate_rows: Callable[..., None]


class RecordedFunctions(NamedTuple):
    """What plays a recording, and what stands in it for operations of torch and for sums over ranks."""

    play: Callable[..., int]
    add: Callable[..., None]
    scale: Callable[..., None]
    convert: Callable[..., None]
    copy_rows: Callable[..., None]
    shared_sum: Callable[..., int]


class Library:
    """The kernels of one instruction set.

    `makes_plain_products`: each product with plain weights is to be theirs, be it the fastest or not.
    """

    makes_plain_products = False

    def __init__(self, instruction_set: InstructionSet, path: Path) -> None:
        self.instruction_set = instruction_set
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
        self.has_tiles = bool(functions.tllm_has_tiles())
        self.quantized = QuantizedFunctions(functions.tllm_quantized_matmul, functions.tllm_scratch_bytes)
        self.float_matmul = functions.tllm_float_matmul
        self.tiles = TileFunctions(
            *(functions.tllm_bfloat16_matmul, functions.tllm_bfloat16_scratch_bytes),
            *(functions.tllm_tiled_attention, functions.tllm_tiled_attention_scratch_bytes),
        )
        self.loading = LoadingFunctions(
            functions.tllm_pack_codes, functions.tllm_split_nibbles, functions.tllm_round_weights
        )
        self.experts = ExpertFunctions(
            functions.tllm_router_matmul, functions.tllm_router_scores, functions.tllm_clamped_swiglu
        )
        self.rows = RowFunctions(
            *(functions.tllm_rms_norm, functions.tllm_gated, functions.tllm_rotate),
            *(functions.tllm_gated_backward, functions.tllm_rms_norm_kept),
            *(functions.tllm_rms_norm_backward, functions.tllm_rotate_rows),
        )
        self.cache = CacheFunctions(functions.tllm_paged_attention, functions.tllm_write_codes)
        self.recorded = RecordedFunctions(
            *(functions.tllm_play, functions.tllm_add, functions.tllm_scale),
            *(functions.tllm_convert, functions.tllm_copy_rows, functions.tllm_shared_sum),
        )
        self.gumbel_max = functions.tllm_gumbel_max
        self.training = TrainingFunctions(
            *(functions.tllm_causal_attention, functions.tllm_causal_attention_scratch_bytes),
            *(functions.tllm_float_gradient, functions.tllm_float_gradient_scratch),
        )
        _share_threads(functions)

    @property
    def has_pairs(self) -> bool:
        """Whether `float_matmul` can multiply numbers of bfloat16 by pairs."""
        return "avx512bf16" in self.instruction_set.compiled_for


def _share_threads(functions: ctypes.CDLL) -> None:
    """Fork through torch's OpenMP; without one that is known the kernels run in the calling thread."""
    omp = openmp()
    if omp is None:
        return
    entry = [omp.GOMP_parallel, omp.omp_get_thread_num, omp.omp_get_num_threads]
    functions.tllm_set_threads(*(ctypes.cast(function, c_void_p) for function in entry))


@functools.cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch works with, if it is one of GNU's interface."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "GOMP_parallel") and hasattr(library, "omp_get_num_threads"):
            return library
    return None


def compiled() -> tuple[InstructionSet, ...]:
    """The instruction sets that this processor has and the installation has kernels for, best first."""
    return tuple(one for one in supported() if path_of(one).is_file())


def path_of(instruction_set: InstructionSet) -> Path:
    return Path(__file__).parent / FOLDER / instruction_set.file


class _OfThread(threading.local):
    """Kernels that a thread uses in place of those that are loaded; how many threads they have, if not torch's; and how
    many torch is to have here again, where others still hold it."""

    library: Library | None = None
    threads: int = 0
    owed: int = 0


class _TorchHeld:
    """How many threads are in `torch_by_one_thread` blocks."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0


_of_thread, _torch_held = _OfThread(), _TorchHeld()


@contextmanager
def using(kernels: Library) -> Iterator[None]:
    """In this thread `library` gives these in the `with` block."""
    before, _of_thread.library = _of_thread.library, kernels
    try:
        yield
    finally:
        _of_thread.library = before


@contextmanager
def torch_by_one_thread() -> Iterator[None]:
    """Called from this thread, torch has no others in the `with` block; kernels have as many as before.

    MKL has one number of threads for the whole process, so that it stays at 1 until the last of several threads has
    left its block. The others get theirs again after a later block.
    """
    before, threads = _of_thread.threads, _of_thread.owed or torch.get_num_threads()
    _of_thread.threads = kernel_threads()
    with _torch_held.lock:
        _torch_held.count += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _torch_held.lock:
            _torch_held.count -= 1
            is_last = not _torch_held.count
            if is_last:
                torch.set_num_threads(threads)
        _of_thread.threads, _of_thread.owed = before, 0 if is_last else threads


def is_torch_held() -> bool:
    """Whether this is in a `torch_by_one_thread` block."""
    return _of_thread.threads > 0


def kernel_threads() -> int:
    """How many threads a kernel has that is called from this one."""
    return _of_thread.threads or _of_thread.owed or torch.get_num_threads()


def library() -> Library | None:
    """The kernels to use; None where there are none for this processor, or `TLLM_KERNELS=off`."""
    return _of_thread.library or loaded()


def kernels_for(x: Tensor) -> Library | None:
    """Those to use for x; None where it lies elsewhere, is of another dtype, or gradients are wanted."""
    if torch.is_grad_enabled() or not x.is_cpu or x.dtype not in DTYPES:
        return None
    return library()


@functools.cache
def loaded() -> Library | None:
    """Those of this process."""
    wanted, known = os.environ.get(CHOICE, ""), compiled()
    if wanted == "off" or not (wanted or known):
        log.warning("no kernels are used: products with weights of few bits take many times as long")
        return None
    for one in known:
        if wanted in ("", one.name):
            return Library(one, path_of(one))
    raise ConfigError(
        f"{CHOICE}={wanted} and this machine has kernels for: {', '.join(one.name for one in known) or 'nothing'}",
        "unset it, or give one of these, or `off`",
    )
