"""The cross-entropy of whole rows of logits on a GPU, with a gradient: logits stay as the product made them.

They are read once, widened to float32 number by number; on the way back their memory becomes their gradient's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 4096
"""Numbers of a row that a program has in its registers."""

WARPS = 8


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, ignored: int) -> Tensor:
    """-log p(label) of each row, in float32; 0 where the label is `ignored`. There can be one backward pass."""
    return _CrossEntropy.apply(logits_TV, labels_T, ignored)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, ignored: int) -> Tensor:
        logits_TV = logits_TV.contiguous()
        tokens, vocab = logits_TV.shape
        loss_T, total_T = (torch.empty(tokens, dtype=torch.float32, device=logits_TV.device) for _ in range(2))
        block = min(BLOCK, triton.next_power_of_2(vocab))
        if tokens:
            _losses[(tokens,)](logits_TV, labels_T, loss_T, total_T, ignored, VOCAB=vocab, BLOCK=block, num_warps=WARPS)
        ctx.save_for_backward(logits_TV, labels_T, total_T)
        ctx.ignored, ctx.block = ignored, block
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, labels_T, total_T = ctx.saved_tensors
        tokens, vocab = logits_TV.shape
        if tokens:
            _of_losses[(tokens,)](
                logits_TV,
                labels_T,
                total_T,
                gradient_T.contiguous(),
                ctx.ignored,
                VOCAB=vocab,
                BLOCK=ctx.block,
                num_warps=WARPS,
            )
        torch.autograd.graph.increment_version(logits_TV)  # torch sees no kernel write, and refuses a second pass so
        return logits_TV, None, None


@triton.jit
def _losses(logits, labels, losses, totals, ignored, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The loss of a row, and the logarithm of the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    # Sums of each place apart, joined at the end. Not -inf to begin with: -inf from -inf is no number.
    largest = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        numbers = tl.load(logits + row * VOCAB + start + at, mask=start + at < VOCAB, other=float("-inf"))
        wide = numbers.to(tl.float32)
        top = tl.where(wide > largest, wide, largest)
        total = total * tl.exp(largest - top) + tl.exp(wide - top)
        largest = top
    top = tl.max(largest, 0)
    whole = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    label = tl.load(labels + row)
    is_learned = label != ignored
    asked = tl.load(logits + row * VOCAB + label, mask=is_learned, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(is_learned, whole - asked, 0.0))
    tl.store(totals + row, whole)


@triton.jit
def _of_losses(logits, labels, totals, of_losses, ignored, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of a row's logits, in their place: softmax less 1 at the label, times that of the loss."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    label, whole = tl.load(labels + row), tl.load(totals + row)
    gradient = tl.load(of_losses + row).to(tl.float32)
    gradient = tl.where(label == ignored, 0.0, gradient)
    for start in range(0, VOCAB, BLOCK):
        place = logits + row * VOCAB + start + at
        numbers = tl.load(place, mask=start + at < VOCAB, other=0.0)
        share = tl.exp(numbers.to(tl.float32) - whole)
        found = tl.where(start + at == label, share - 1.0, share) * gradient
        tl.store(place, found.to(numbers.dtype), mask=start + at < VOCAB)
