"""`LoraUpdate`: what a LoRA adapter (2106.09685) adds to one linear, cut as the linear is.

The update of a piece W[a:b, c:d] of a weight is scale B[a:b, :] A[:, c:d]. So where outputs are cut, each rank has all
of A and its rows of B; where inputs are cut, its columns of A and all of B, and what it adds is a part of the sum over
ranks that the layer makes anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tllm.kernels.batch_invariant import invariant_matmul, is_batch_invariant
from tllm.kernels.float_product import float_matmul
from tllm.kernels.library import is_torch_held
from tllm.kernels.training.training_matmul import training_matmul
from tllm.parallel.quantized_weight import quantized
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter, shard_of
from tllm.spec.cut import Range

B_NAME = ".lora_B.weight"

ELEMENTS_AT_ONCE, ON_DEVICE_AT_ONCE = 2**20, 2**22
"""Of a weight whose squares are summed at once: what stays in a processor's caches, and what fills a device."""

Product = Callable[[Tensor, Tensor], Tensor]
"""x W^T of x and W."""

Factor = Callable[[], Tensor]
"""DoRA's factors of the outputs that an update has, [outputs]."""


class LoraModule(NamedTuple):
    """The rank of one module's update, what B A x is multiplied by, and whether it has magnitudes (DoRA)."""

    rank: int
    scale: float
    use_dora: bool = False


class Span(NamedTuple):
    """Outputs [start, stop) of a linear that are those of one module, with its rows [first, last) of A x."""

    start: int
    stop: int
    first: int
    last: int
    scale: float


class DoraUpdate(Protocol):
    """An update that may be part of DoRA: what its factors and their norms are made of."""

    A: nn.Parameter
    spans: list[Span]
    outputs: int
    factor: Factor | None

    def rows_of_B(self) -> list[Tensor]: ...

    def magnitudes(self) -> Iterator[nn.Parameter]: ...

    def rescaled(self, factor_F: Tensor, weight: Tensor, x_TD: Tensor, product_TF: Tensor) -> Tensor: ...


class LoraUpdate(nn.Module):
    """x_TD -> scale B A x, [T, outputs], for the modules of `weight` that are adapted, and 0 for its others.

    `weight` is that of a linear, whose modules may be merged; A of all of them is one matrix. Parameters have the names
    that `tensor_names` gives. Ranks that hold the same elements each compute a part of their gradient.

    Beside a weight in few bits or one that is batch-invariant a row has the same bits whatever is computed beside it.
    With DoRA, whoever uses it calls `rescaled` with the factors, which `factor` gives where nothing is learned.
    """

    def __init__(self, weight: Tensor, modules: Mapping[str, LoraModule]) -> None:
        super().__init__()
        self.matmul = product_beside(weight)
        self.factor: Factor | None = None
        pieces_A: list[ShardPiece] = []
        self.B, self.spans = nn.ParameterList(), list[Span]()
        self.outputs = at = 0
        for name, pieces in modules_of(weight):
            start, stop = pieces[0].target[0][0], pieces[-1].target[0][1]
            self.outputs = max(self.outputs, stop)
            if name not in modules:
                continue
            (rank, scale, _), (name_A, name_B), columns = modules[name], tensor_names(name), pieces[0].source[1]
            width = columns[1] - columns[0]
            pieces_A.append(ShardPiece(name_A, ((0, rank), columns), ((at, at + rank), (0, width))))
            rows = [
                ShardPiece(name_B, (piece.source[0], (0, rank)), (_behind(piece.target[0], start), (0, rank)))
                for piece in pieces
            ]
            self.B.append(cut_parameter((stop - start, rank), Shard(tuple(rows), True, "partial")))
            self.spans.append(Span(start, stop, at, at + rank, scale))
            at += rank
        self.A = cut_parameter((at, width), Shard(tuple(pieces_A), True, "partial"))

    def forward(self, x_TD: Tensor) -> Tensor:
        return product_of_spans(x_TD, self.A, self.B, self.spans, self.outputs, self.matmul)

    def rescaled(self, factor_F: Tensor, weight: Tensor, x_TD: Tensor, product_TF: Tensor) -> Tensor:
        """What is added to W x, which is `product_TF`, where each output is multiplied by a factor (DoRA)."""
        added_TF: Tensor = factor_F * self(x_TD) + (factor_F - 1) * product_TF
        return added_TF

    def rows_of_B(self) -> list[Tensor]:
        """B of each span."""
        return list(self.B)

    def magnitudes(self) -> Iterator[nn.Parameter]:
        """DoRA's magnitudes of the outputs, span by span, cut as the rows of B are, without values."""
        for b in self.B:
            pieces = tuple(
                ShardPiece(magnitude_name(piece.name.removesuffix(B_NAME)), piece.source[:1], piece.target[:1])
                for piece in shard_of(b).pieces
            )
            yield cut_parameter(b.shape[:1], Shard(pieces, True, "partial"))


def product_of_spans(
    x_TD: Tensor, a_RD: Tensor, bs_FR: Iterable[Tensor], spans: Sequence[Span], outputs: int, product: Product
) -> Tensor:
    """scale B A x of each span, by its own B, and 0 for the other ones of so many outputs: [T, outputs]."""
    z_TR, parts, at = product(x_TD, a_RD), list[Tensor](), 0
    for span, b_FR in zip(spans, bs_FR, strict=True):
        parts.append(z_TR.new_zeros(len(x_TD), span.start - at))
        parts.append(product(z_TR[:, span.first : span.last], b_FR) * span.scale)
        at = span.stop
    return torch.cat([*parts, z_TR.new_zeros(len(x_TD), outputs - at)], dim=1)


def tensor_names(module: str) -> tuple[str, str]:
    """What A and B of a module are called."""
    return f"{module}.lora_A.weight", f"{module}{B_NAME}"


def magnitude_name(module: str) -> str:
    """What the magnitudes of a module with DoRA are called, [outputs]."""
    return f"{module}.lora_magnitude_vector"


def weight_of(linear: nn.Module) -> Tensor:
    """The weight of one of the linears that can be adapted."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight


def squares_of_rows(weight: Tensor, update: DoraUpdate, adds: bool = True) -> Tensor:
    """The sums of squares of the rows of W + scale B A that are held here, or of W, of the spans of an update one after
    another: in float32 at least, some rows at a time. Weights in few bits are the numbers that they stand for."""
    sums, packed = list[Tensor](), quantized(weight)
    if weight.dim() == 3:  # the rows of one head after another
        weight = weight.flatten(0, 1)
    for span, b in zip(update.spans, update.rows_of_B(), strict=True):
        a = update.A[span.first : span.last]
        wide = torch.promote_types(a.dtype, torch.float32)
        at_once = max(1, (ELEMENTS_AT_ONCE if a.is_cpu else ON_DEVICE_AT_ONCE) // a.shape[1])
        for start in range(span.start, span.stop, at_once):
            stop = min(start + at_once, span.stop)
            whole = (weight[start:stop] if packed is None else packed.between(start, stop)).to(wide)
            if adds:
                some = b[start - span.start : stop - span.start].to(wide)
                whole = torch.addmm(whole, some, a.to(wide), alpha=span.scale)
            sums.append(whole.square().sum(1))
    return torch.cat(sums)


def product_beside(weight: Tensor) -> Product:
    """The product of an update beside this weight, or beside those of several experts."""
    is_packed = getattr(weight, "quantized", None) is not None
    return row_matmul if is_packed or is_batch_invariant(weight) else plain_matmul


def row_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T, without gradients one whose rows do not depend on each other."""
    return (training_matmul if torch.is_grad_enabled() else invariant_matmul)(x_TD, weight_FD)


def plain_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T, without gradients by one of the few products that are prepared."""
    if torch.is_grad_enabled() or not x_TD.is_cpu or is_torch_held():
        return training_matmul(x_TD, weight_FD)
    return float_matmul(x_TD, weight_FD)


def modules_of(weight: Tensor) -> Iterator[tuple[str, list[ShardPiece]]]:
    """The pieces of a weight by the module that they are of, with what they leave out filled in.

    Those of a stack [experts, inputs, outputs] are of each expert, [outputs, inputs], as if it had a tensor of its own.
    """
    found: dict[str, list[ShardPiece]] = {}
    shard = shard_of(weight)
    for piece in shard.matrices or shard.pieces:
        target = piece.target or tuple((0, stop - start) for start, stop in piece.source)
        found.setdefault(piece.name.removesuffix(".weight"), []).append(ShardPiece(piece.name, piece.source, target))
    for name, pieces in found.items():
        held = sum(piece.target[0][1] - piece.target[0][0] for piece in pieces)
        assert held == pieces[-1].target[0][1] - pieces[0].target[0][0], f"the rows of {name} do not lie together"
        yield name, pieces


def _behind(rows: Range, start: int) -> Range:
    return rows[0] - start, rows[1] - start
