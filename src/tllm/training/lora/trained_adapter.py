"""`TrainedAdapter`: the LoRA updates that are trained on a rank's chunk of layers, whose own weights are frozen.

The model knows nothing of it: it calls the `Adapt` that a microbatch is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tllm.devices.choose import CPU
from tllm.model.transformer import Transformer
from tllm.parallel.expert_dispatch import ExpertRows
from tllm.parallel.linear import Adapt, matmul, unadapted
from tllm.parallel.lora.adapted_model import Update, updates_of
from tllm.parallel.lora.lora_update import LoraModule, LoraUpdate, rescaled, weight_of
from tllm.parallel.shard import shard_of
from tllm.quantization.reference_matmul import on_grid
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.seeds import DRAWS
from tllm.training.lora.dora import Magnitudes
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
            is_dora = any(module.use_dora for module in modules.values())
            some = self.of_linear.items() if is_dora else ()
            self.with_magnitudes = {one: update for one, update in some if isinstance(update, LoraUpdate)}
            self.magnitudes = {
                linear: Magnitudes(linear, update, model.seam.tp) for linear, update in self.with_magnitudes.items()
            }
        self.learned = nn.ModuleList()  # in the order in which a forward pass needs them
        for linear, update in self.of_linear.items():
            self.learned.append(update)
            if linear in self.magnitudes:
                self.learned.append(self.magnitudes[linear])
        for parameter in self.parameters():
            wide = torch.promote_types(dtype, torch.float32)
            parameter.data = torch.empty(parameter.shape, dtype=wide, device=device)
            parameter.requires_grad_()
        self.dropout = dropout

    def of_microbatch(self, tokens: Tokens, learns: bool) -> Adapt:
        """What the linears add for a microbatch; where nothing is learned, no input is dropped."""
        if not self.dropout or not learns:
            return AdaptedMicrobatch(self.of_linear, self.magnitudes)
        return AdaptedMicrobatch(self.of_linear, self.magnitudes, self.dropout, tokens.of_tokens[DRAWS])

    def first_magnitudes(self) -> dict[nn.Parameter, Tensor]:
        """DoRA's first values, of the model as it was filled. All ranks of a tensor-parallel group call it together."""
        found = dict[nn.Parameter, Tensor]()
        for linear, magnitudes in self.magnitudes.items():
            found |= magnitudes.first_values(weight_of(linear), self.with_magnitudes[linear])
        return found

    @torch.no_grad()
    def hold_factors(self) -> None:
        """Give the updates DoRA's factors as they are now, for an engine that samples, which computes with `of_linear`
        alone. All ranks of a tensor-parallel group call it together."""
        for linear, magnitudes in self.magnitudes.items():
            update = self.with_magnitudes[linear]
            update.rescale = partial(rescaled, magnitudes(weight_of(linear), update))


@dataclass(frozen=True, eq=False)
class AdaptedMicrobatch:
    """An `Adapt` for one microbatch, all of whose rows have the one adapter.

    Linears that are one product here (queries, keys and values; gate and up) see one input, with one dropout.
    """

    updates: Mapping[nn.Module, Update]
    magnitudes: Mapping[nn.Module, Magnitudes]
    dropout: float = 0.0
    draws_T: Tensor | None = None

    def __call__(self, linear: nn.Module, x_TD: Tensor, y_TF: Tensor, rows: ExpertRows | None = None) -> Tensor:
        update = self.updates.get(linear)
        if update is None:
            return y_TF
        base_TF, dtype = y_TF, x_TD.dtype
        x_TD = x_TD.to(update.A.dtype)
        magnitudes = self.magnitudes.get(linear)
        if self.draws_T is not None:
            first = shard_of(update.A).pieces[0]
            x_TD = dropped_out(x_TD, self.draws_T, first.name, first.source[1][0], self.dropout)
            if magnitudes is not None:  # as PEFT has it, what magnitudes change goes by the inputs that are left
                base_TF = matmul(x_TD.to(dtype), weight_of(linear))
        added_TF: Tensor = update(x_TD) if rows is None else update(x_TD, rows.first_rows)
        if magnitudes is not None:
            factor_F: Tensor = magnitudes(weight_of(linear), update)
            added_TF = rescaled(factor_F, added_TF, base_TF)
        if y_TF.dtype == torch.float64 != dtype and not torch.is_grad_enabled():
            added_TF = on_grid(added_TF)  # beside exact partial sums, as the engine has it
        return y_TF + added_TF.to(y_TF.dtype)
