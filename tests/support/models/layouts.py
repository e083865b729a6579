"""Run a model under a plan with its ranks as threads of this process: the forward pass, and nothing of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tests.support.models.packed_causal import PackedCausal
from tests.support.models.slow_load import slow_load
from tllm.comm.collectives.group import Group, local_groups
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import mesh_of
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

T = TypeVar("T")


def spec_of(folder: Path) -> ModelSpec:
    return spec_from_config(read_config(folder))


def in_threads(tasks: list[Callable[[], T]]) -> list[T]:
    """Run one task a thread and return their results in order; the first failure is raised here."""
    results: list[T | None] = [None] * len(tasks)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except BaseException as failure:  # noqa: BLE001  (the caller raises it)
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]


def logits_under(
    folder: Path,
    plan_text: str,
    ids_T: Tensor,
    dtype: torch.dtype,
    mutate: Callable[[int, Transformer], None] = lambda rank, model: None,
    shift: int = 0,
    fill: Callable[[Transformer, Path], None] = slow_load,
) -> Tensor:
    """Logits [T, V] of one prompt. `mutate` may damage a rank's model before it runs; `shift` moves all positions.

    `fill` reads a rank's weights from the folder.
    """

    def prepare(rank: int, model: Transformer) -> None:
        fill(model, folder)
        mutate(rank, model)

    spec = spec_of(folder)
    plan = Plan.parse(plan_text, spec.num_layers)
    x: Tensor = ids_T
    with torch.inference_mode():
        for stage in range(plan.pp):
            groups = local_groups(plan.stages[stage].tp)
            models = [
                _model(spec, plan, rank, group, dtype, prepare)
                for rank, group in zip(plan.ranks(stage), groups, strict=True)
            ]
            outs = in_threads([partial(_forward, model, x, ids_T, shift) for model in models])
            for other in outs[1:]:
                assert torch.equal(outs[0][0], other[0]), "ranks of a stage must agree to the bit"
            x = outs[0][0]
    return torch.cat([logits for _, logits in outs], dim=-1)


def _model(
    spec: ModelSpec,
    plan: Plan,
    rank: int,
    group: Group,
    dtype: torch.dtype,
    prepare: Callable[[int, Transformer], None],
) -> Transformer:
    model = build(spec, mesh_of(spec, plan, rank, group), dtype)
    prepare(rank, model)
    return model


def _forward(model: Transformer, x: Tensor, ids_T: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    length = len(ids_T)
    with torch.inference_mode():
        attend = PackedCausal(model.attention_specs(), [length])
        positions_T = torch.arange(length) + shift
        out = model(x, positions_T, attend, lengths_T=torch.full((length,), length), ids_T=ids_T)
        return out, model.logits(out) if model.is_last else torch.empty(0)
