"""`AdaptedMicrobatch`: what a trained adapter adds to the linears of one microbatch, with dropout of what it sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tllm.parallel.expert_dispatch import ExpertRows
from tllm.parallel.linear import HeadLinear, matmul
from tllm.parallel.lora.adapted_model import Update
from tllm.parallel.lora.expert_update import ExpertUpdate
from tllm.parallel.lora.head_update import HeadUpdate
from tllm.parallel.lora.lora_update import weight_of
from tllm.parallel.shard import shard_of
from tllm.quantization.reference_matmul import on_grid
from tllm.training.lora.dora import Magnitudes
from tllm.training.lora.lora_dropout import dropped_out


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which `part` of the inputs of updates is dropped, by a number of each token's own.

    `of_inputs`: the updates whose inputs are mixed by attention before they are multiplied, by these inputs. They are
    dropped token by token all the same: attention mixes them as well, beside those of which nothing is dropped.
    """

    part: float
    draws_T: Tensor
    of_inputs: Mapping[nn.Module, HeadUpdate]

    def __call__(self, x_TD: Tensor, update: Update) -> Tensor:
        """What is left of an update's inputs."""
        first = shard_of(update.A).pieces[0]
        return dropped_out(x_TD, self.draws_T, first.name, first.source[1][0], self.part)


@dataclass(frozen=True, eq=False)
class AdaptedMicrobatch:
    """An `Adapt` for one microbatch, all of whose rows have the one adapter.

    Linears that are one product here (queries, keys and values; gate and up) see one input, with one dropout.
    """

    updates: Mapping[nn.Module, Update]
    magnitudes: Mapping[nn.Module, Magnitudes]
    dropout: Dropout | None = None

    def __call__(self, linear: nn.Module, x_TD: Tensor, y_TF: Tensor, rows: ExpertRows | None = None) -> Tensor:
        if self.dropout is not None and linear in self.dropout.of_inputs:
            update = self.dropout.of_inputs[linear]
            return torch.cat((y_TF, self.dropout(x_TD.to(update.A.dtype), update).to(y_TF.dtype)), dim=1)
        found = self.updates.get(linear)
        if found is None:
            return y_TF
        if isinstance(found, HeadUpdate) and self.dropout is not None:
            return self._of_dropped_inputs(linear, found, x_TD, y_TF)
        base_TF, dtype = y_TF, x_TD.dtype
        x_TD = x_TD.to(found.A.dtype)
        if self.dropout is not None:
            x_TD = self.dropout(x_TD, found)
            if linear in self.magnitudes:  # as PEFT has it, what magnitudes change goes by the inputs that are left
                base_TF = matmul(x_TD.to(dtype), weight_of(linear))
        added_TF = self._added(linear, found, x_TD, base_TF, rows)
        if y_TF.dtype == torch.float64 != dtype and not torch.is_grad_enabled():
            added_TF = on_grid(added_TF)  # beside exact partial sums, as the engine has it
        return y_TF + added_TF.to(y_TF.dtype)

    def _of_dropped_inputs(self, linear: nn.Module, update: HeadUpdate, x_TNA: Tensor, y_TNB: Tensor) -> Tensor:
        """Of queries, columns for the linear's own inputs and behind them those for what is left of these; of what
        attention gives, whose columns are so, the sum of both products."""
        assert isinstance(linear, HeadLinear)
        if update.is_transposed:
            added_TNB = self._added(linear, update, x_TNA.to(update.A.dtype), y_TNB)
            return torch.cat((y_TNB, added_TNB.to(y_TNB.dtype)), dim=2)
        left_TNA = x_TNA[..., update.A.shape[1] :]
        base_TNB = linear.product(left_TNA) if linear in self.magnitudes else y_TNB
        return y_TNB + self._added(linear, update, left_TNA.to(update.A.dtype), base_TNB).to(y_TNB.dtype)

    def _added(
        self, linear: nn.Module, update: Update, x_TD: Tensor, base_TF: Tensor, rows: ExpertRows | None = None
    ) -> Tensor:
        """What is added to the product of the weight, which of these inputs is `base_TF`."""
        if isinstance(update, ExpertUpdate):
            assert rows is not None
            of_experts: Tensor = update(x_TD, rows.first_rows)
            return of_experts
        if linear not in self.magnitudes:
            of_linear: Tensor = update(x_TD)
            return of_linear
        weight = weight_of(linear)
        return update.rescaled(self.magnitudes[linear](weight, update), weight, x_TD, base_TF)
