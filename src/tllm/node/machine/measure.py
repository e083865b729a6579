"""Measures this machine: matrix products as a model's layers have them, memory, and the overhead of one operation.

Every number is a median, so that what else ran for a moment does not count. The clock is handed in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.devices.memory import completed
from tllm.kernels.float_product import product_name
from tllm.kernels.library import library
from tllm.parallel.linear import matmul
from tllm.parallel.quantized_weight import PackedRows, QuantizedWeight
from tllm.planner.cluster.profile import MemorySpeed, ProductSpeed
from tllm.quantization.packed_layout import pack
from tllm.quantization.round_weights import round_weights
from tllm.spec.quantized.weight_form import Quantize

ROWS = (1, 8, 64, 512)
"""Tokens in a batch: one sequence that decodes, several that do, and a chunk of a prompt."""

WIDTHS = (1024, 4096)

DEVICE_ROWS, DEVICE_WIDTHS = (*ROWS, 4096), (4096, 8192)
"""Of a device with more units than a processor has, which smaller products leave without work."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_BYTES = 256 * 2**20
"""Bytes that the memory's speed is measured on: more than the caches of most machines hold."""

DEVICE_MEMORY_BYTES = 2**30

FEW_BITS: tuple[Quantize, ...] = ("int8", "int4")

LEAST = 3
OPERATIONS = 1000

Clock = Callable[[], float]


@dataclass(frozen=True)
class Speeds:
    """What was measured: `operation` in seconds."""

    products: tuple[ProductSpeed, ...]
    memory: MemorySpeed
    operation: float


def measure(seconds: float, memory_free: int, clock: Clock = time.perf_counter, device: torch.device = CPU) -> Speeds:
    """Measure everything in about `seconds`, on this process's threads or its `device`, in at most a quarter of the
    free memory."""
    widths, streamed = (WIDTHS, MEMORY_BYTES) if device == CPU else (DEVICE_WIDTHS, DEVICE_MEMORY_BYTES)
    few_bits = FEW_BITS if device == CPU else ()  # those of a device are not measured yet
    share = seconds / (len(DTYPES) + len(few_bits) / 2 + 1)
    with torch.inference_mode():
        products = [
            found for name in DTYPES for found in measure_products(name, share, memory_free // 4, clock, widths, device)
        ]
        products += [found for kind in few_bits for found in measure_few_bits(kind, share / 2, clock)]
        memory = measure_memory(share * 0.8, min(streamed, memory_free // 8), clock, device)
        return Speeds(tuple(products), memory, measure_operation(share * 0.2, clock, device))


def measure_products(
    name: str,
    seconds: float,
    memory: int,
    clock: Clock = time.perf_counter,
    widths: tuple[int, ...] = WIDTHS,
    device: torch.device = CPU,
) -> Iterator[ProductSpeed]:
    """Products of every shape, in one dtype, that fit their part of `seconds` and `memory` bytes.

    A shape of which one product would take longer, by the best speed of the one before, is left out: a dtype without
    units of its own may be a hundred times slower than the others.
    """
    each = ROWS if device == CPU else DEVICE_ROWS
    dtype, share, known = DTYPES[name], seconds / (len(each) * len(widths)), 0.0
    for width in widths:
        if (width + 2 * max(each)) * width * dtype.itemsize > memory:
            return
        weight_FD = _any(width, width, dtype, device)
        for rows in each:
            work = 2 * rows * width * width
            if known and work / known > share:
                continue
            x_TD = _any(rows, width, dtype, device)
            taken = repeat(completed(partial(matmul, x_TD, weight_FD), device), share, clock)
            known = work / min(taken)
            chosen = product_name(x_TD, weight_FD) if device == CPU else "linear"
            yield ProductSpeed(name, rows, width, work / statistics.median(taken), len(taken), chosen)


def measure_few_bits(kind: Quantize, seconds: float, clock: Clock = time.perf_counter) -> Iterator[ProductSpeed]:
    """Products of bfloat16 activations with weights that are rounded to few bits, of every shape.

    Where there are no kernels for this processor they would take too long to measure, and are left out.
    """
    kernels, share = library(), seconds / (len(ROWS) * len(WIDTHS))
    if kernels is None:
        return
    for width in WIDTHS:
        blocks = round_weights(_any(width, width, torch.float32), kind)
        weight = QuantizedWeight([PackedRows(pack(blocks), blocks.scheme, width, width)], width)
        for rows in ROWS:
            taken = repeat(partial(weight.matmul, _any(rows, width, torch.bfloat16)), share, clock)
            rate = 2 * rows * width * width / statistics.median(taken)
            yield ProductSpeed(kind, rows, width, rate, len(taken), f"kernel {kernels.instruction_set.name}")


def measure_memory(
    seconds: float, size: int, clock: Clock = time.perf_counter, device: torch.device = CPU
) -> MemorySpeed:
    """Read and copy `size` bytes, again and again."""
    columns = 1024
    matrix = _any(max(1, size // (4 * columns)), columns, torch.float32, device)
    vector, copied = _any(1, columns, torch.float32, device)[0], torch.empty_like(matrix)
    read = statistics.median(repeat(completed(lambda: torch.mv(matrix, vector), device), seconds / 2, clock))
    copy = statistics.median(repeat(completed(lambda: copied.copy_(matrix), device), seconds / 2, clock))
    return MemorySpeed(matrix.nbytes / read, 2 * matrix.nbytes / copy)


def measure_operation(seconds: float, clock: Clock = time.perf_counter, device: torch.device = CPU) -> float:
    """Seconds of one torch operation that computes almost nothing: the overhead of calling it."""
    one = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(OPERATIONS):
            one.add_(1)

    return statistics.median(repeat(completed(many, device), seconds, clock)) / OPERATIONS


def repeat(work: Callable[[], object], seconds: float, clock: Clock = time.perf_counter) -> list[float]:
    """The seconds that each call took: as many as `seconds` hold, three or more, after one that warms up."""
    until = clock() + seconds
    work()
    taken: list[float] = []
    while len(taken) < LEAST or clock() < until:
        begun = clock()
        work()
        taken.append(clock() - begun)
    return taken


def _any(rows: int, width: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Numbers of ordinary size, no two rows alike: products of zeros or denormal numbers take another time."""
    values = torch.linspace(-1, 1, rows * width + 1, device=device)[:-1]
    return values.view(rows, width).to(dtype)
