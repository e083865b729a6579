"""Builds the runs of layers that one rank trains: one chunk of the model, or several for an interleaved schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tllm.core.errors import PlanError
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import shard_of
from tllm.spec.model_spec import ModelSpec


def build_chunks(
    spec: ModelSpec, mesh: Mesh, places: Sequence[range], dtype: torch.dtype, device: torch.device | str | None = None
) -> list[Transformer]:
    """This rank's chunks, in order, without values; `places` are the layers of every place, `mesh.pp` the stages."""
    chunks = len(places) // mesh.pp
    assert chunks * mesh.pp == len(places), "each stage has as many chunks as the others"
    if mesh.pp == 1 and chunks > 1 and spec.tied:
        raise PlanError(
            f"one stage would hold the table of a tied model in 2 of its {chunks} chunks",
            "give pp of 2 or more, or one chunk: on one stage there is nobody to interleave with",
        )
    runs = [places[chunk * mesh.pp + mesh.stage] for chunk in range(chunks)]
    return [build(spec, replace(mesh, layers=run, pp=len(places)), dtype, device).requires_grad_() for run in runs]


def parameters_of(trained: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Every parameter of what a rank trains, its chunks or their adapters, once, in the model's order."""
    return [parameter for module in trained for parameter in module.parameters()]


def without_memory(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give a model built on "meta" parameters of a device that take no memory yet: `FlatParameters` gives them some.

    Until then they have no values, and must not be read.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:
                empty = torch.empty(old.shape, dtype=old.dtype, device=device)
                empty.untyped_storage().resize_(0)
                made[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad)
                made[id(old)].shard = shard_of(old)  # type: ignore[attr-defined]
            setattr(module, name, made[id(old)])
