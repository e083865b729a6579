"""Which tokens of a microbatch each block of a grid has: whole documents, so that attention needs no other rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tllm.parallel.grid.grid import Grid
from tllm.spec.grid.dealt_documents import dealt_documents
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED


def grid_tokens(tokens: Tokens, grid: Grid) -> Tokens:
    """What a rank has of a whole microbatch: labels, positions and documents of its inner block.

    Its ids are those of all blocks that it looks up. Blocks are filled to equal lengths, each by a last document of
    id 0 that is not learned.
    """
    assert tokens.spans is None and not tokens.prefixes, "a microbatch is cut once, and its documents are on their own"
    dealt = dealt_documents(tokens.lengths, grid.shape.token_blocks)
    room = max(sum(tokens.lengths[n] for n in block) for block in dealt)
    documents = torch.split(tokens.ids_T, tokens.lengths)
    ids = [_filled([documents[n] for n in dealt[block]], room, tokens.ids_T, 0) for block in grid.looked_up()]
    mine = dealt[grid.shape.inner_block(grid.at)]
    labels, lengths = torch.split(tokens.labels_T, tokens.lengths), [tokens.lengths[n] for n in mine]
    over = room - sum(lengths)
    lengths += [over] if over else []
    positions = [torch.arange(length, device=tokens.ids_T.device) for length in lengths]
    labels_T = _filled([labels[n] for n in mine], room, tokens.labels_T, IGNORED)
    return Tokens(torch.cat(ids), labels_T, torch.cat(positions), lengths)


def _filled(parts: Sequence[Tensor], room: int, like: Tensor, value: int) -> Tensor:
    """These one after another, and as many of the value as there is room for."""
    return torch.cat([*parts, like.new_full((room - sum(map(len, parts)),), value)])
