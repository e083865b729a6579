"""`TrainedAdapter`: what is learned of a rank's chunk of layers where the model itself is not: updates of its linears.

The model knows nothing of it: it calls the `Adapt` that a microbatch is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tllm.devices.choose import CPU
from tllm.model.transformer import Transformer
from tllm.parallel.linear import Adapt, unadapted
from tllm.parallel.lora import LoraModule, LoraUpdate, updates_of
from tllm.parallel.shard import shard_of
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.seeds import DRAWS
from tllm.training.lora.lora_dropout import dropped_out

MakeAdapt = Callable[[int, Tokens], Adapt]
"""make(number of a chunk, its microbatch) -> what its linears are to add."""


def as_it_is(chunk: int, tokens: Tokens) -> Adapt:
    """The model without an adapter."""
    return unadapted


class TrainedAdapter(nn.Module):
    """The updates of the linears of `model` that are among `modules`, without values; in float32 at least.

    The model's own parameters are frozen. Ranks that hold the same elements of an update each compute a part of their
    gradient. The model may be on the meta device still: the updates are on `device`.
    """

    def __init__(
        self,
        model: Transformer,
        modules: Mapping[str, LoraModule],
        dtype: torch.dtype,
        dropout: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        model.requires_grad_(False)
        with torch.device(device):
            self.of_linear = updates_of(model, modules)
        self.updates = nn.ModuleList(self.of_linear.values())
        for parameter in self.parameters():
            wide = torch.promote_types(dtype, torch.float32)
            parameter.data = torch.empty(parameter.shape, dtype=wide, device=device)
            parameter.requires_grad_()
        self.dropout = dropout

    def of_microbatch(self, tokens: Tokens, learns: bool) -> Adapt:
        """What the linears add for a microbatch; where nothing is learned, no input is dropped."""
        if not self.dropout or not learns:
            return AdaptedMicrobatch(self.of_linear)
        return AdaptedMicrobatch(self.of_linear, self.dropout, tokens.of_tokens[DRAWS])


@dataclass(frozen=True, eq=False)
class AdaptedMicrobatch:
    """An `Adapt` for one microbatch, all of whose rows have the one adapter.

    Linears that are one product here (queries, keys and values; gate and up) see one input, with one dropout.
    """

    updates: Mapping[nn.Module, LoraUpdate]
    dropout: float = 0.0
    draws_T: Tensor | None = None

    def __call__(self, linear: nn.Module, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        update = self.updates.get(linear)
        if update is None:
            return y_TF
        x_TD = x_TD.to(update.A.dtype)
        if self.draws_T is not None:
            first = shard_of(update.A).pieces[0]
            x_TD = dropped_out(x_TD, self.draws_T, first.name, first.source[1][0], self.dropout)
        added_TF: Tensor = update(x_TD)
        return y_TF + added_TF.to(y_TF.dtype)
