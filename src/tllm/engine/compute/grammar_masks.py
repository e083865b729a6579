"""What a grammar does to logits: tokens that it does not allow have none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tllm.engine.schedule.grammar_state import unpack_mask


def apply_mask(scores_V: Tensor, mask: bytes) -> Tensor:
    """Scores over the whole vocabulary, with minus infinity for each token that the packed `mask` does not allow.

    FrameError for a mask that is not one of this vocabulary.
    """
    vocab_size = scores_V.shape[0]
    bytes_N = torch.frombuffer(bytearray(unpack_mask(mask, vocab_size)), dtype=torch.uint8)
    is_allowed_V = (bytes_N[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:vocab_size].bool()
    return scores_V.masked_fill(~is_allowed_V, -math.inf)
