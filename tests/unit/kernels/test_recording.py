"""What is written down of a computation and played: the operations of torch that have kernels there, and the memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.library import Library
from tllm.kernels.recording.held_memory import ROUNDED_TO, HeldMemory
from tllm.kernels.recording.recorder import Recorder, Recording
from tllm.kernels.row_operations import row_operations

EACH_LIBRARY = pytest.mark.parametrize("kernels", libraries(), ids=lambda one: one.instruction_set.name)
ODD = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, -1e-40, 1e-45, 65519.0, 65520.0, 0.0, -0.0])
"""Numbers that are rounded in ways of their own."""


def numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, width, dtype=torch.float64) * 10.0 ** torch.randint(-6, 6, (rows, 1))
    x.view(-1)[: len(ODD)] = ODD.double()[: rows * width]
    return x.to(dtype)


def steps(x: Tensor, y: Tensor, bias: Tensor, sums: Tensor) -> Tensor:
    """Of operations that can all be recorded."""
    added = (x + y) + bias
    heads = added.unflatten(-1, (-1, 3))[:, 1:].contiguous()  # rows that lie apart, but for a single one
    return (heads.flatten(1) + sums.to(x.dtype)).float()


@torch.inference_mode()
def recorded(kernels: Library, memory: HeldMemory, *inputs: Tensor) -> tuple[Recording, Tensor]:
    recorder = Recorder(kernels, memory)
    with recorder.recording():
        out = steps(*inputs)
    recording = recorder.recorded()
    assert recording is not None, recorder.refused
    return recording, out


@EACH_LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operations_have_the_bits_of_torch(kernels: Library, dtype: torch.dtype) -> None:
    """When they are recorded, and when they are played with other numbers."""
    for rows, width in ((1, 15), (3, 48), (4, 37 * 3)):
        inputs = [numbers(rows, width, dtype) for _ in range(2)]
        inputs += [numbers(1, width, dtype)[0], numbers(rows, width - 3, torch.float64)]
        with torch.inference_mode():
            recording, out = recorded(kernels, HeldMemory(), *inputs)
            for _ in range(2):
                torch.testing.assert_close(out, steps(*inputs), rtol=0, atol=0, equal_nan=True)
                for x in inputs:
                    x.copy_(numbers(1, x.numel(), x.dtype).view(x.shape))
                recording.play()


@EACH_LIBRARY
@torch.inference_mode()
def test_kernels_are_played(kernels: Library) -> None:
    """With what they are given when played, also where a bias and a norm lie between."""
    x, weight = torch.randn(2, 48), torch.randn(48)
    recorder = Recorder(kernels, HeldMemory())
    with recorder.recording():
        rows = row_operations(x)
        assert rows is not None
        out = rows.gated(rows.rms_norm(x, weight, 1e-5, False) + x, "silu")
    recording, first = recorder.recorded(), out.clone()
    assert recording is not None and len(recording) == 3
    x.neg_()
    recording.play()
    torch.testing.assert_close(
        out, torch.nn.functional.silu(-_normed(-x, weight)[:, :24]) * -_normed(-x, weight)[:, 24:]
    )
    x.neg_()
    recording.play()
    assert torch.equal(out, first)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-5) + x


@torch.inference_mode()
def test_what_has_no_kernel_is_computed_and_refused() -> None:
    x = torch.randn(2, 16)
    for compute in (torch.tanh, lambda x: x.add(x, alpha=2), lambda x: x.clone().add_(1), lambda x: x.to(torch.int64)):
        recorder = Recorder(libraries()[0], HeldMemory())
        with recorder.recording():
            found = compute(x)
        assert torch.equal(found, compute(x)) and recorder.refused and recorder.recorded() is None


def test_memory_goes_on_to_later_tensors_once_no_view_is_left() -> None:
    memory = HeldMemory()
    first = memory.empty((3, 5), torch.bfloat16)
    view, place = first[1:], first.data_ptr()
    del first
    gc.collect()
    assert memory.empty((4,), torch.float32).data_ptr() != place and memory.nbytes == 2 * ROUNDED_TO
    del view
    gc.collect()
    again = memory.empty((5, 5), torch.float32)
    assert again.data_ptr() == place and again.shape == (5, 5) and memory.nbytes == 2 * ROUNDED_TO
    assert memory.empty((ROUNDED_TO,), torch.float64).numel() == ROUNDED_TO and memory.nbytes == 10 * ROUNDED_TO
