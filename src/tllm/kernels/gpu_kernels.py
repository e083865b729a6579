"""The kernels for GPUs: loaded where Triton is, which comes with torch's builds for CUDA, ROCm and XPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any, NamedTuple

from tllm.kernels.library import CHOICE

DEVICES = ("cuda", "xpu")
"""The kinds of devices that Triton compiles for; ROCm's are called cuda."""


class GpuKernels(NamedTuple):
    """`products` of few rows; `row_operations` are the small operations of a layer, `trained_rows` the same with
    gradients; `loss`, `attention`, `rows` and `few_bits` the modules of `kernels/gpu`."""

    products: Any
    row_operations: Any
    trained_rows: Any
    loss: Any
    attention: Any
    rows: Any
    few_bits: Any


def gpu_kernels(kind: str) -> GpuKernels | None:
    """The kernels for a kind of device; None: torch's own operations, as with TLLM_KERNELS=off."""
    return _loaded() if kind in DEVICES else None


@functools.cache
def _loaded() -> GpuKernels | None:
    """Triton compiles functions that it finds where a module is read, so theirs are read only where it is."""
    if os.environ.get(CHOICE) == "off" or importlib.util.find_spec("triton") is None:
        return None
    attention = importlib.import_module("tllm.kernels.gpu.paged_attention")
    rows = importlib.import_module("tllm.kernels.gpu.row_operations")
    trained = importlib.import_module("tllm.kernels.gpu.trained_rows")
    loss = importlib.import_module("tllm.kernels.gpu.trained_loss")
    products = importlib.import_module("tllm.kernels.gpu.products").GpuProducts()
    few_bits = importlib.import_module("tllm.kernels.gpu.few_bits")
    operations = rows.GpuRowOperations(), trained.TrainedRowOperations()
    return GpuKernels(products, *operations, loss, attention, rows, few_bits)
