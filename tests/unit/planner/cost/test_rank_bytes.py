"""Each parameter is as large as in the model that is really built, for every family and cut."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.support.models.families import FAMILIES, save_model
from tests.support.models.layouts import spec_of
from tllm.comm.collectives.group import local_groups
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import shard_of
from tllm.planner.cost.rank_bytes import run_parameters
from tllm.spec.cut import cut_stage
from tllm.training.optim.zero3 import units_of
from tllm.training.step.model_chunks import build_chunks


@pytest.mark.parametrize("case", FAMILIES)
def test_planned_parameters_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_of(tmp_path)
    ep = 2 if any(layer.moe for layer in spec.layers) else 1
    for shares, experts, places in (
        ((1,), "cut", [range(4)]),
        ((1, 2, 1), "cut", [range(1), range(1, 4)]),
        ((1, 1), "spread", [range(2), range(2, 4)]),
    ):
        cuts = cut_stage(spec, shares, experts, ep)  # type: ignore[arg-type]
        for place, tp in enumerate(local_groups(len(shares))):
            for stage, layers in enumerate(places):
                for replica in range(ep):
                    eps = local_groups(ep, name="ep")
                    mesh = Mesh(stage, len(places), range(0), tp, cuts[place], ep=eps[replica])
                    (model,) = build_chunks(spec, mesh, places, torch.float32, "meta")
                    planned = list(chain.from_iterable(run_parameters(spec, layers, cuts[place], replica)))
                    built = [(p.numel(), shard_of(p).spread, shard_of(p).wide) for p in model.parameters()]
                    assert sorted(planned) == sorted(built)
                    units = [len({id(p) for p in unit.parameters()}) for unit in units_of([model])]
                    if not spec.tied:
                        assert [
                            len(unit) for unit in run_parameters(spec, layers, cuts[place], replica) if unit
                        ] == units
