"""`tllm profile` of a CUDA device: products as a graph plays them, of plain weights and of those in few bits."""

from __future__ import annotations

import pytest
import torch

from tllm.cli.commands.profile import WEIGHT_BYTES, products_table
from tllm.devices.memory import available_memory
from tllm.node.machine.measure import DEVICE_WIDTHS, measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0)


def test_what_each_product_of_one_row_reads_of_memory() -> None:
    """Weights come from memory and the device does not wait for the host: none is faster than memory is read, and a
    wide plain one is near to it. A part of a tenth is what starting kernels one by one would leave of small ones."""
    found = measure(20.0, available_memory(DEVICE), device=DEVICE)
    print(products_table(found.products))
    shares = {
        (one.dtype, one.width): one.flops_per_second / 2 * WEIGHT_BYTES[one.dtype] / found.memory.read
        for one in found.products
        if one.rows == 1
    }
    print({f"{dtype} {width}": round(share, 2) for (dtype, width), share in shares.items()}, found.memory)
    assert shares.keys() == {(dtype, width) for dtype in WEIGHT_BYTES for width in DEVICE_WIDTHS}
    assert max(shares.values()) < 1.15
    assert shares["bfloat16", max(DEVICE_WIDTHS)] > 0.6
    assert min(shares.values()) > 0.02
