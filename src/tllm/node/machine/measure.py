"""Measures this machine: matrix products as a model's layers have them, memory, and the overhead of one operation.

Every number is a median, so that what else ran for a moment does not count. The clock is handed in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.devices.memory import completed
from tllm.kernels.float_product import product_name
from tllm.kernels.gpu_kernels import gpu_kernels
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

DEVICE_CACHE_BYTES = 2**29
"""More than the caches of devices hold (MI300X: 256 MiB): products with so many weights in turn read each from
memory."""

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
    share = seconds / (len(DTYPES) + len(FEW_BITS) / 2 + 1)
    with torch.inference_mode():
        products = [
            found
            for name in (*DTYPES, *FEW_BITS)
            for found in measure_products(
                name, share if name in DTYPES else share / 2, memory_free // 4, clock, widths, device
            )
        ]
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
    """Products of every shape that fit their part of `seconds` and `memory` bytes. `name` is a dtype, or one of
    `FEW_BITS`: weights that are rounded to these, and activations of bfloat16.

    A shape of which one product would take longer, by the best speed of the one before, is left out: a dtype without
    units of its own may be a hundred times slower than the others. So are few bits where there are no kernels for them.
    On a device they are of several weights in turn, as those of a model, so that no cache has them.
    """
    if name in FEW_BITS and _few_bits_kernels(device) is None:
        return
    dtype, rows, known = DTYPES.get(name, torch.bfloat16), _rows(device), 0.0
    share = seconds / (len(rows) * len(widths))
    for width in widths:
        number_bytes = 4 if name in FEW_BITS else dtype.itemsize  # few bits are rounded from float32
        if (width + 2 * max(rows)) * width * number_bytes > memory:
            return
        weights = _weights_in_turn(name, width, memory, device)
        for count in rows:
            work = 2 * count * width * width
            if known and len(weights) * work / known > share:
                continue
            x_TD = _any(count, width, dtype, device)
            taken = _each([partial(matmul, x_TD, weight) for weight in weights], share, clock, device)
            known = work / min(taken)
            chosen = _product_in_words(x_TD, weights[0])
            yield ProductSpeed(name, count, width, work / statistics.median(taken), len(taken), chosen)


def _weights_in_turn(name: str, width: int, memory: int, device: torch.device) -> Sequence[Tensor | QuantizedWeight]:
    """[width, width], several equal ones on a device."""
    if name in FEW_BITS:
        blocks = round_weights(_any(width, width, torch.float32), name)
        packed = QuantizedWeight([PackedRows(pack(blocks), blocks.scheme, width, width)], width)
        return [packed.to(device) for _ in range(_in_turn(packed.nbytes, memory, device))]
    first_FD = _any(width, width, DTYPES[name], device)
    return [first_FD, *(first_FD.clone() for _ in range(1, _in_turn(first_FD.nbytes, memory, device)))]


def _product_in_words(x_TD: Tensor, weight: Tensor | QuantizedWeight) -> str:
    """The product that was found to be the fastest."""
    if isinstance(weight, QuantizedWeight):
        return _few_bits_kernels(x_TD.device) or ""
    return product_name(x_TD, weight) if x_TD.device == CPU else "linear"


def _rows(device: torch.device) -> tuple[int, ...]:
    return ROWS if device == CPU else DEVICE_ROWS


def _few_bits_kernels(device: torch.device) -> str | None:
    """Whose kernels multiply with weights in few bits, in words; None where torch's own steps do."""
    if device != CPU:
        return None if gpu_kernels(device.type) is None else "Triton"
    kernels = library()
    return None if kernels is None else f"kernel {kernels.instruction_set.name}"


def _in_turn(nbytes: int, memory: int, device: torch.device) -> int:
    """How many weights of so many bytes are to be multiplied with in turn, in so much memory."""
    return 1 if device == CPU else max(1, min(DEVICE_CACHE_BYTES, memory) // nbytes)


def _each(products: list[Callable[[], object]], seconds: float, clock: Clock, device: torch.device) -> list[float]:
    """The seconds that one of the products took, of every time that all were made, one after another."""
    taken = repeat(completed(_one_after_another(products, device), device), seconds, clock)
    return [each / len(products) for each in taken]


def _one_after_another(products: list[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """All of these: on CUDA as a graph, as replies are computed, so that the device does not wait for the host."""

    def make_all() -> None:
        for product in products:
            product()

    if device.type != "cuda":
        return make_all
    make_all()  # kernels are compiled and chosen, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_all()
    return graph.replay


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
