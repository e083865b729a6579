"""Weights and adapters are read onto a device as onto the processor, and each part of a model gives there what `tllm
verify` compares it with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.support.device.separate_device import SEPARATE
from tests.support.models.adapters import save_adapter
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tllm.comm.collectives.group import solo
from tllm.devices.choose import CPU
from tllm.engine.assembly import make_stage
from tllm.engine.schedule.batch import Batch, BatchEntry, Sampling
from tllm.model.transformer import Transformer, build
from tllm.node.roles.comparison_record import Record, compare, fingerprints
from tllm.node.roles.reference_model import batches_of, limits_for, write_reference
from tllm.node.roles.verify_rank import held_part, play
from tllm.parallel.mesh import mesh_of, whole
from tllm.spec.plan import Plan
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import HeldAs, load
from tllm.weights.lora.adapter_files import read_adapter
from tllm.weights.safetensors_index import Index

EXACT = torch.float64
IDS = (1, 17, 100, 5, 66, 42, 8, 9, 77, 2, 3, 55)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model("llama", made)
    return made


def loaded(folder: Path, device: torch.device, plan: str = "pp=1") -> Transformer:
    """The part of the first rank."""
    spec, source = spec_of(folder), LocalFiles(folder)
    model = build(spec, mesh_of(spec, Plan.parse(plan, spec.num_layers), 0, solo()), EXACT, "meta")
    load(model, Index.read(source), source, EXACT, held=HeldAs(device=device))
    return model


def test_weights_on_a_device_are_those_of_the_files(folder: Path) -> None:
    there = loaded(folder, SEPARATE[1])
    assert {parameter.device for parameter in there.parameters()} == {SEPARATE[1]}
    assert fingerprints(there) == fingerprints(loaded(folder, CPU))


def test_an_adapter_is_where_its_model_is_and_changes_the_rows_of_its_requests(folder: Path, tmp_path: Path) -> None:
    spec, source = spec_of(folder), LocalFiles(save_adapter(folder, tmp_path))
    limits, plan = limits_for(spec, len(IDS)), Plan.parse("pp=1", spec.num_layers)
    entries = [
        BatchEntry(key, 0, 4, 4, ((key, 1),), Sampling(logprobs=2), lora=lora) for key, lora in enumerate(("", "a"))
    ]
    limits = msgspec.structs.replace(limits, num_pages=2, max_num_seqs=2)
    found = []
    for device in (CPU, SEPARATE[1]):
        model = loaded(folder, device)
        updates = read_adapter(source).load(model, source, EXACT, model.seam.tp)
        assert updates and {x.device for update in updates.values() for x in update.parameters()} == {device}
        stage = make_stage(model, mesh_of(spec, plan, 0, solo()), plan, None, limits)
        stage.adapters.add("a", updates)
        results = stage.start(Batch(0, tuple(entries), 2 * IDS[:4]))
        assert results is not None
        found.append([one.logprob for one in results.logprobs if one is not None])
    assert found[1] == pytest.approx(found[0], abs=1e-12) and found[0][0] != found[0][1]


def test_what_a_stage_computes_is_on_the_host_when_its_time_is_taken(folder: Path) -> None:
    """A device computes on when its host is done, and what a rank takes for replies would be the host's part alone."""
    spec, sent = spec_of(folder), list[Tensor]()
    limits, plan = limits_for(spec, len(IDS)), Plan.parse("pp=2", spec.num_layers)
    ring: Any = SimpleNamespace(next=SimpleNamespace(send_bytes=lambda payload: None), send=sent.append)
    stage = make_stage(loaded(folder, SEPARATE[1], "pp=2"), mesh_of(spec, plan, 0, solo()), plan, ring, limits)
    assert stage.start(batches_of(IDS, limits)[0]) is None
    assert [x_TD.device for x_TD in sent] == [CPU] and stage.cache.device == SEPARATE[1]


def test_each_part_on_a_device_gives_what_the_undivided_model_gives(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    limits, plan = limits_for(spec, len(IDS)), Plan.parse("pp=1", spec.num_layers)
    batches = batches_of(IDS, limits)
    write_reference(folder, tmp_path, spec, EXACT, batches, limits)
    model = loaded(folder, SEPARATE[1])
    record = Record(model)
    play(make_stage(model, mesh_of(spec, plan, 0, solo()), plan, None, limits), batches)
    found = compare(record, tmp_path, held_part(whole(spec), model, batches))
    assert len(found) == spec.num_layers + 2 and max(one.relative for one in found) < 1e-12
