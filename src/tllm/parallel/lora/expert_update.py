"""`ExpertUpdate`: what an adapter adds to one of the two products of a layer's experts, cut as these are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tllm.parallel.expert_dispatch import split_by_expert
from tllm.parallel.lora.lora_update import (
    LoraModule,
    Span,
    modules_of,
    product_beside,
    product_of_spans,
    tensor_names,
)
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter, shard_of
from tllm.spec.cut import Range


class ExpertUpdate(nn.Module):
    """x_ND -> scale B A x, [N, outputs], of the expert that each row goes to, and 0 for parts that are not adapted.

    `weight` [experts, outputs, inputs], or one whose shard has matrices of each expert, has the same `modules` of every
    expert, which have one rank and one scale. A of all experts are one matrix, and so are those B that are of one part
    (gate, up): [experts x rank, inputs] and [experts x outputs, rank].
    """

    def __init__(self, weight: Tensor, modules: Mapping[str, LoraModule]) -> None:
        super().__init__()
        self.matmul = product_beside(weight)
        of_experts: dict[int, list[tuple[str, ShardPiece]]] = {}
        for name, pieces in modules_of(weight):
            (piece,) = pieces
            if name in modules:
                of_experts.setdefault(piece.target[0][0], []).append((name, piece))
        self.experts = len(of_experts)
        self.spans = list[Span]()
        self.outputs = max(pieces[-1].target[1][1] for _, pieces in modules_of(weight))
        at = 0
        for name, piece in of_experts[0]:
            (rank, scale, _), (start, stop) = modules[name], piece.target[1]
            self.spans.append(Span(start, stop, at, at := at + rank, scale))
        spread = shard_of(weight).spread
        pieces_A, pieces_B = list[ShardPiece](), [list[ShardPiece]() for _ in self.spans]
        for expert, parts in of_experts.items():
            for span, into, (name, piece) in zip(self.spans, pieces_B, parts, strict=True):
                (name_A, name_B), (rows, columns) = tensor_names(name), piece.source
                ranks, width, size = (0, span.last - span.first), columns[1] - columns[0], span.stop - span.start
                here = expert * at + span.first, expert * at + span.last
                pieces_A.append(ShardPiece(name_A, (ranks, columns), (here, (0, width))))
                into.append(ShardPiece(name_B, (rows, ranks), (_run(expert, size), ranks)))
        self.A = cut_parameter((self.experts * at, width), Shard(tuple(pieces_A), True, "partial", spread))
        self.B = nn.ParameterList(
            cut_parameter(
                (self.experts * (span.stop - span.start), span.last - span.first),
                Shard(tuple(pieces), True, "partial", spread),
            )
            for span, pieces in zip(self.spans, pieces_B, strict=True)
        )

    def forward(self, x_ND: Tensor, first_rows: Tensor) -> Tensor:
        """Rows [first_rows[e], first_rows[e + 1]) are those of expert e."""
        a_ERD = self.A.unflatten(0, (self.experts, -1)).unbind()  # type: ignore[no-untyped-call]
        b_EFR = [b.unflatten(0, (self.experts, -1)).unbind() for b in self.B]
        made = [
            product_of_spans(some_ND, a_ERD[at], [b[at] for b in b_EFR], self.spans, self.outputs, self.matmul)
            for at, some_ND in split_by_expert(x_ND, first_rows)
        ]
        return torch.cat(made)


def _run(place: int, size: int) -> Range:
    """The numbers of a part of this size, of parts that lie one after another."""
    return place * size, (place + 1) * size
