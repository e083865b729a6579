"""`RankAdapters`: the LoRA adapters that one rank has loaded, and what they add to a batch whose rows may each have
another adapter."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.core.errors import FrameError, RequestError
from tllm.devices.choose import CPU
from tllm.engine.schedule.batch import Batch, ForgetAdapter
from tllm.parallel.expert_dispatch import ExpertRows
from tllm.parallel.experts import first_rows
from tllm.parallel.linear import Adapt, unadapted
from tllm.parallel.lora.adapted_model import Update
from tllm.parallel.lora.expert_update import ExpertUpdate
from tllm.parallel.lora.lora_update import weight_of
from tllm.quantization.reference_matmul import on_grid
from tllm.spec.request import Request

Updates = Mapping[nn.Module, Update]
"""An adapter's part on one rank: the update of each linear that it adapts."""


class RankAdapters:
    """Adapters by their ids. Another thread than the one that computes may add one."""

    def __init__(self) -> None:
        self._loaded: dict[str, Updates] = {}
        self._numbers: dict[str, int] = {}
        self._changing = threading.Lock()

    def add(self, lora: str, updates: Updates, number: int = 0) -> None:
        """Let batches name this adapter. `number` tells this loading of it from an earlier one."""
        with self._changing:
            self._numbers[lora] = number
            self._loaded[lora] = updates

    def remove(self, message: ForgetAdapter) -> None:
        """Let go of an adapter, unless it was loaded once more since."""
        with self._changing:
            if self._numbers.get(message.lora) == message.number:
                del self._loaded[message.lora], self._numbers[message.lora]

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        with self._changing:
            updates = nn.ModuleList(update for of_adapter in self._loaded.values() for update in of_adapter.values())
        return sum(parameter.nbytes for parameter in updates.parameters())

    def check(self, request: Request) -> None:
        """RequestError for a request whose adapter is not here."""
        if request.lora and request.lora not in self._loaded:
            raise RequestError(f"the adapter of request {request.id} is not loaded", "load it again")

    def of_batch(self, batch: Batch, device: torch.device = CPU) -> Adapt:
        """What is to be added to the linears of a batch on `device`. FrameError for an adapter that is not here."""
        rows, at = defaultdict[str, list[int]](list), 0
        for entry in batch.entries:
            if entry.lora:
                rows[entry.lora] += range(at, at + entry.count)
            at += entry.count
        if not rows:
            return unadapted
        if missing := rows.keys() - self._loaded.keys():
            raise FrameError(f"batch {batch.number} names the adapter {min(missing)}, which is not loaded here")
        return AdaptedRows([_Group(self._loaded[lora], torch.tensor(some).to(device)) for lora, some in rows.items()])


class _Group(NamedTuple):
    """The rows of a batch that have one adapter."""

    updates: Updates
    rows_N: Tensor


class AdaptedRows:
    """An `Adapt` for one batch: the rows of each adapter go through its update together.

    Partial sums of weights in few bits are in float64 and exact; what is added is a multiple of 2^-30 there too.
    """

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def of_rows(self, own: slice) -> AdaptedRows:
        """What is added to these rows of the batch, where they are computed on their own."""
        found = []
        for updates, rows_N in self._groups:
            rows_N = rows_N[(rows_N >= own.start) & (rows_N < own.stop)]
            found += [_Group(updates, rows_N - own.start)] if len(rows_N) else []
        return AdaptedRows(found)

    def __call__(self, linear: nn.Module, x_TD: Tensor, y_TF: Tensor, rows: ExpertRows | None = None) -> Tensor:
        for updates, rows_N in self._groups:
            update = updates.get(linear)
            if update is not None:
                of_experts: tuple[Tensor, ...] = ()
                if rows is not None:  # the batch's rows, sorted by experts
                    rows_N = torch.isin(rows.tokens_N, rows_N).nonzero().flatten()
                    of_experts = (first_rows(rows.experts_N[rows_N], len(rows.first_rows) - 1),)
                x_ND = x_TD[rows_N].to(update.A.dtype)  # one that is trained may be wider than the model
                if isinstance(update, ExpertUpdate) or update.factor is None:
                    added_NF = update(x_ND, *of_experts)
                else:
                    added_NF = update.rescaled(update.factor(), weight_of(linear), x_ND, y_TF[rows_N])
                is_exact = y_TF.dtype == torch.float64 and x_TD.dtype != torch.float64
                y_TF.index_add_(0, rows_N, on_grid(added_NF) if is_exact else added_NF.to(y_TF.dtype))
        return y_TF
