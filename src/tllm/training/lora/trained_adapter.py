"""`TrainedAdapter`: the LoRA updates that are trained on a rank's chunk of layers, whose own weights are frozen.

The model knows nothing of it: it calls the `Adapt` that a microbatch is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tllm.devices.choose import CPU
from tllm.model.transformer import Transformer
from tllm.parallel.linear import Adapt, HeadInputs, unadapted
from tllm.parallel.lora.adapted_model import updates_of, with_dora
from tllm.parallel.lora.head_update import HeadUpdate
from tllm.parallel.lora.lora_update import Factor, LoraModule, weight_of
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.seeds import DRAWS
from tllm.training.lora.adapted_microbatch import AdaptedMicrobatch, Dropout
from tllm.training.lora.dora import Magnitudes

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
            self.with_magnitudes = with_dora(self.of_linear) if is_dora else {}
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
        of_heads = {update.name: update for update in self.of_linear.values() if isinstance(update, HeadUpdate)}
        inputs = [module for module in model.modules() if isinstance(module, HeadInputs)]
        self.of_inputs: dict[nn.Module, HeadUpdate] = {
            one: of_heads[one.name] for one in inputs if one.name in of_heads
        }
        self.dropout = dropout

    def of_microbatch(self, tokens: Tokens, learns: bool) -> Adapt:
        """What the linears add for a microbatch; where nothing is learned, no input is dropped."""
        if not self.dropout or not learns:
            return AdaptedMicrobatch(self.of_linear, self.magnitudes)
        dropout = Dropout(self.dropout, tokens.of_tokens[DRAWS], self.of_inputs)
        return AdaptedMicrobatch(self.of_linear, self.magnitudes, dropout)

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
            update.factor = _held(magnitudes(weight_of(linear), update))


def _held(factor_F: Tensor) -> Factor:
    return lambda: factor_F
