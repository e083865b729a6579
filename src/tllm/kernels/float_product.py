"""x W^T for plain weights by the product that is fastest on this machine for this shape: measured, never assumed.

Which of torch's products reads a matrix fastest differs between processors by several times, in either direction
(docs/log/serving.md). So the first product of each kind (rows, shape, dtype, threads) times the candidates on the
weight itself, and the winner is kept (`kernels/autotune.py`). Candidates differ by rounding only. Where layers are
recorded, all products are our kernels': whether that pays is measured on the layers (`engine/recording_choice.py`), and
how the kernel reads a weight for a single row on the products themselves (`kernels/product_ways.py`).

oneDNN, which makes torch's products of 16-bit numbers, prepares one anew for each number of rows that it does not keep:
a millisecond on an Intel Xeon with AMX, ten times what a product of a small weight takes, and half a megabyte. A batch
of a server has any number of rows. So they are rounded up (`padded_rows`), and few are prepared;
the memory of a server grew for hours by what was prepared, and dropped again, between tensors (docs/log/memory.md).

Where the processor multiplies numbers of bfloat16 by pairs (AVX-512 BF16), several rows take half as many operations
(csrc/bfloat16_pairs.c), and sums are rounded otherwise then.

On processors with AMX our own product by tiles (csrc/bfloat16_tiles.c) reads weights as they lie, and prepares nothing.
Its threads take parts as they come to them, where oneDNN's have halves: of cores that are unlike, or that others use as
well, the slower one has less to do. Times at their best do not show that, so oneDNN's must be clearly better.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice, fastest, next_power_of_two
from tllm.kernels.library import DTYPE_NUMBERS, DTYPES, LANES, Library, kernel_threads, library
from tllm.kernels.product_ways import ROW_WAYS, ProductWays, Way

MEASURED_ROWS = 64
"""For more rows than these a product is bound by arithmetic: torch's own is taken, or that by tiles."""

MEASURED_BYTES = 2**20
"""Of smaller weights a product takes less time than what is around it: nothing is measured."""

LARGE_BYTES = 4 * 2**20
"""From such a weight on the rows that are added cost more than a product that is prepared anew: fewer are added."""

IN_DOUBLING, IN_DOUBLING_OF_LARGE = 4, 8
"""Numbers of rows between a power of two and the next one: at most a quarter is added, and beside large weights an
eighth."""

TILED = 32
"""Outputs and columns of weights that are multiplied by tiles are a multiple of this, and columns of those by pairs."""

ROWS_BY_TILES = 256
"""Up to so many rows tiles take 0.4 to 1.1 times as long as oneDNN's product beside weights of less than
`MEASURED_BYTES`, from 1,024 on 1.1 to 1.5 times as long (docs/log/serving.md)."""

TILE_ROWS = 16
"""Rows that oneDNN's products of 16-bit numbers make at once, with AMX."""

Product = Callable[[Tensor, Tensor], Tensor]


class ProductKind(NamedTuple):
    """Products that are alike: `rows` is the largest number of rows that counts as the same."""

    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype
    threads: int


choices = Autotuned[ProductKind]("product")
row_ways = ProductWays[ProductKind]("a row by the kernel")


def float_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T without gradients, in x's dtype."""
    return CANDIDATES[product_name(x_TD, weight_FD)](x_TD, weight_FD)


def product_name(x_TD: Tensor, weight_FD: Tensor) -> str:
    """The candidate that is the fastest for these, measured if it is not known yet."""
    rows, kernels = len(x_TD), library()
    if kernels is not None and kernels.makes_plain_products and x_TD.dtype in DTYPES and weight_FD.is_contiguous():
        names = ("tiles", "kernel by pairs", "kernel")
        return next(name for name in names if _is_candidate(name, x_TD, weight_FD))
    if rows == 0 or x_TD.dtype == torch.float64:
        return "linear"
    if weight_FD.nbytes < MEASURED_BYTES:
        return "tiles" if rows <= ROWS_BY_TILES and _is_candidate("tiles", x_TD, weight_FD) else "linear"
    if rows > MEASURED_ROWS and not _is_candidate("tiles", x_TD, weight_FD):
        return "linear"
    kind = kind_of(rows, weight_FD)
    choice = choices.known.get(kind)
    if choice is None:
        choice = choices.choose(kind, names_for(x_TD, weight_FD), partial(measure, x_TD, weight_FD))
    return choice.name


def kind_of(rows: int, weight_FD: Tensor) -> ProductKind:
    outputs, columns = weight_FD.shape
    return ProductKind(next_power_of_two(rows), outputs, columns, weight_FD.dtype, kernel_threads())


def measure(x_TD: Tensor, weight_FD: Tensor) -> Choice:
    """Time every candidate that there is for these."""
    return fastest({name: partial(CANDIDATES[name], x_TD, weight_FD) for name in names_for(x_TD, weight_FD)}, "tiles")


def names_for(x_TD: Tensor, weight_FD: Tensor) -> list[str]:
    """The candidates that there are for these."""
    names = CANDIDATES if len(x_TD) <= MEASURED_ROWS else ("linear", "tiles")
    return [name for name in names if _is_candidate(name, x_TD, weight_FD)]


def _is_candidate(name: str, x_TD: Tensor, weight_FD: Tensor) -> bool:
    kernels = library()
    are_bfloat16 = x_TD.dtype == weight_FD.dtype == torch.bfloat16 and weight_FD.is_contiguous()
    match name:
        case "torch.mv":
            return len(x_TD) == 1
        case "kernel":
            return kernels is not None
        case "kernel, one by one":
            return kernels is not None and len(x_TD) == 1
        case "kernel by pairs":
            fits = weight_FD.shape[1] % TILED == 0 and len(x_TD) > 1
            return kernels is not None and kernels.has_pairs and are_bfloat16 and fits
        case "tiles":
            fits = all(size % TILED == 0 for size in weight_FD.shape)
            return kernels is not None and kernels.has_tiles and are_bfloat16 and fits
    return True


def padded_rows(rows: int, in_doubling: int) -> int:
    """So many rows, or some more: a power of two up to a tile, then whole tiles, and where those are more than that, so
    many numbers in each doubling. So less than a tile is added, or than that part."""
    power = next_power_of_two(rows)
    step = max(TILE_ROWS, power // (2 * in_doubling))
    return power if rows <= TILE_ROWS else -(-rows // step) * step


@cache
def is_prepared(dtype: torch.dtype) -> bool:
    """Whether torch's products of such numbers are oneDNN's on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    makes = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in makes and bool(makes[dtype]())


def _padded(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x with rows of zeros, so many that a product with this weight is one of those few that are prepared."""
    rows = len(x_TD)
    if not is_prepared(x_TD.dtype):
        return x_TD
    padded = padded_rows(rows, IN_DOUBLING if weight_FD.nbytes < LARGE_BYTES else IN_DOUBLING_OF_LARGE)
    if padded == rows:
        return x_TD
    x_PD = x_TD.new_zeros(padded, x_TD.shape[1])
    x_PD[:rows] = x_TD
    return x_PD


def _linear(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return F.linear(_padded(x_TD, weight_FD), weight_FD)[: len(x_TD)]


def _mv(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return torch.mv(weight_FD, x_TD[0]).unsqueeze(0)


def _transposed(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return torch.mm(weight_FD, _padded(x_TD, weight_FD).t()).t()[: len(x_TD)].contiguous()


def _kernel(x_TD: Tensor, weight_FD: Tensor, way: Way = Way.SIDE_BY_SIDE) -> Tensor:
    """The kernel of csrc/float_matmul.c: reads the weights once, in order, and sums in float32.

    `way`: as candidates have it. A single row of a recording is multiplied in the way that is the fastest.
    """
    kernels = library()
    assert kernels is not None and weight_FD.is_contiguous()
    x_TD = x_TD.contiguous()
    y_TF = torch.empty(len(x_TD), len(weight_FD), dtype=x_TD.dtype)

    def product(way: Way) -> None:
        multiply_by_kernel(kernels, x_TD, weight_FD, y_TF, way, kernel_threads())

    if kernels.makes_plain_products and len(x_TD) == 1 and weight_FD.nbytes >= MEASURED_BYTES:
        row_ways.make(kind_of(1, weight_FD), ROW_WAYS, product)
    else:
        product(way)
    return y_TF


def multiply_by_kernel(kernels: Library, x_TD: Tensor, weight_FD: Tensor, y_TF: Tensor, way: Way, threads: int) -> None:
    """Write x W^T to y, of x's dtype. All three are contiguous."""
    (rows, columns), number = x_TD.shape, DTYPE_NUMBERS[x_TD.dtype]
    scratch = torch.empty(rows * -(-columns // LANES) * LANES, dtype=torch.float32)  # each row of x in whole vectors
    weight, of_weight = weight_FD.data_ptr(), DTYPE_NUMBERS[weight_FD.dtype]
    x, y, outputs = x_TD.data_ptr(), y_TF.data_ptr(), len(weight_FD)
    kernels.float_matmul(
        *(weight, of_weight, outputs, columns, x, number, rows, y, number, scratch.data_ptr(), way, threads)
    )


def _tiles(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """The kernel of csrc/bfloat16_tiles.c: a row has the same bits whatever other rows there are."""
    kernels = library()
    assert kernels is not None and _is_candidate("tiles", x_TD, weight_FD)
    x_TD = x_TD.contiguous()
    (rows, columns), outputs, threads = x_TD.shape, len(weight_FD), kernel_threads()
    y_TF = torch.empty(rows, outputs, dtype=x_TD.dtype)
    scratch = torch.empty(kernels.tiles.scratch_bytes(rows, columns, threads), dtype=torch.uint8)
    weight, x, y = weight_FD.data_ptr(), x_TD.data_ptr(), y_TF.data_ptr()
    kernels.tiles.bfloat16_matmul(weight, outputs, columns, x, rows, y, scratch.data_ptr(), threads)
    return y_TF


CANDIDATES: dict[str, Product] = {
    "linear": _linear,
    "torch.mv": _mv,
    "W x^T": _transposed,
    "kernel": _kernel,
    "kernel, one by one": partial(_kernel, way=Way.ONE_BY_ONE),
    "kernel by pairs": partial(_kernel, way=Way.BY_PAIRS),
    "tiles": _tiles,
}
"""The products by the names that `tllm profile` shows."""
