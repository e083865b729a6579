"""`InvariantAttend`: attention over packed documents whose forward pass gives the engine's numbers to the bit.

The engine attends by a batch-invariant kernel: a token's numbers are the same in any tile and batch. Without gradients
this uses the same kernel; with gradients it is `TrainAttend`.
"""

from __future__ import annotations

from itertools import accumulate, chain

from torch import Tensor

from tllm.kernels.library import kernels_for
from tllm.kernels.paged_attention import TiledAttention, TokenTile, fits, tokens_of_tile
from tllm.model.attention import AttentionSpec, first_heads
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens


class InvariantAttend(TrainAttend):
    """Takes no part of a microbatch: its keys are all here, in the order of its tokens."""

    def __init__(self, specs: dict[int, AttentionSpec], tokens: Tokens) -> None:
        assert not tokens.prefixes, "a prompt that is shared is not rounded as the engine rounds it"
        super().__init__(specs, tokens)
        self.kernels: dict[AttentionSpec, TiledAttention] = {}

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        spec, firsts = self.specs[layer], first_heads(self.specs[layer], q_TNH.shape[1], k_TKH.shape[1])
        library = kernels_for(q_TNH) if fits(q_TNH.shape[2], firsts) else None
        if library is None:
            return super().__call__(layer, q_TNH, k_TKH, v_TKH, sinks_N)
        if spec not in self.kernels:
            tiles = document_tiles(self.lengths, spec.window, tokens_of_tile(firsts))
            self.kernels[spec] = TiledAttention(library, tiles, firsts, spec.scale, spec.softcap or 0.0, spec.window)
        keys_KSH, values_KSH = (x.transpose(0, 1).contiguous() for x in (k_TKH, v_TKH))
        return self.kernels[spec](q_TNH, keys_KSH, values_KSH, sinks_N=sinks_N)


def document_tiles(lengths: list[int], window: int | None, most: int) -> list[TokenTile]:
    """Tiles of at most so many tokens, of documents whose keys lie one after another."""
    tiles = []
    for length, first_slot in zip(lengths, accumulate(chain((0,), lengths)), strict=False):
        for start in range(0, length, most):
            stop = min(start + most, length)
            first_key = 0 if window is None else max(0, start - window + 1)
            tiles.append(TokenTile(start, stop, first_key, [range(first_slot + first_key, first_slot + stop)]))
    return tiles
