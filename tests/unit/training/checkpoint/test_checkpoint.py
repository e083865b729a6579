"""`final/` is a Hugging Face folder: `transformers` opens it and computes what the run's model computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.comm.ranks import run_ranks
from tests.support.models.families import save_model
from tests.support.models.packed_causal import PackedCausal
from tests.unit.training.saves import Cut, Truth, held, on_ranks, world
from tllm.comm.collectives.group import Group, local_groups
from tllm.core.errors import WeightsError
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.training.checkpoint import fetch_files
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import export_checkpoint, open_folder
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.manifest import NAME, VERSION, CheckpointManifest, StoredFile, decode, encode
from tllm.training.state.tensor_blocks import model_blocks
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load
from tllm.weights.manifest import FileHashes, Manifest
from tllm.weights.safetensors_index import Index


def saved(truth: Truth, cut: Cut, root: Path) -> None:
    def work(group):  # type: ignore[no-untyped-def]
        _, blocks = held(truth, cut, group.rank)
        truth.fill(blocks)
        checkpoints = AsyncSaves(root, group)
        checkpoints.save(3, blocks, {})
        assert checkpoints.wait()[0].error == ""

    on_ranks(world(truth, cut), work)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_transformers_opens_it(tmp_path: Path, tied: bool, dtype: torch.dtype | None) -> None:
    truth = Truth(5, tie_word_embeddings=tied)
    saved(truth, Cut("pp=2,tp=1+3,layers=1+3,shares=1:2:1", dp=2, seams=(0.4,)), tmp_path / "run")
    (tmp_path / "tokenizer.json").write_text("{}")
    final = tmp_path / "run" / "final"
    export_checkpoint(
        open_folder(tmp_path / "run" / "step-3"), final, truth.config, dtype, [tmp_path / "tokenizer.json"], 2000
    )
    assert len(list(final.glob("model-*-of-*.safetensors"))) > 2
    assert (final / "tokenizer.json").read_text() == "{}"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        final, output_loading_info=True, dtype=dtype or torch.float32, experts_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr() or not tied
    if dtype is not None:
        rounded = truth.tensors["model.layers.0.self_attn.q_proj.weight"].to(dtype)
        assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, rounded)
        return
    ids = torch.tensor([[1, 5, 2, 9, 12, 0, 3]])
    ours = build(truth.spec, whole(truth.spec), torch.float32)
    truth.fill(model_blocks(ours))
    attend = PackedCausal(ours.attention_specs(), [ids.numel()])
    with torch.inference_mode():
        logits = ours.logits(ours(ids[0], torch.arange(ids.numel()), attend))
        torch.testing.assert_close(model(ids).logits[0], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "..", "", "a\0b"])
def test_a_list_of_another_rank_that_leads_out_of_the_folder_is_refused(file: str) -> None:
    """Files that a node lacks are written where the list says."""
    piece = StoredFile("x", ((0, 1),), "F32", file)
    hashes = Manifest(1, 1024, {file: FileHashes(4, ["0" * 64])})
    with pytest.raises(WeightsError, match=r"checkpoint\.json names a file"):
        decode(encode(CheckpointManifest(VERSION, 3, {"x": (1,)}, (piece,), hashes, {})))


@pytest.mark.parametrize("case", ["llama", "qwen2_moe", "phi3", "gemma2"])
def test_from_a_folder_through_a_save_to_a_folder(tmp_path: Path, case: str) -> None:
    """Every tensor of what `transformers` saved comes back, bit for bit."""
    there = save_model(case, tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    model = build(spec_from_config(config), whole(spec_from_config(config)), torch.float32)
    source = LocalFiles(tmp_path / "in")
    load(model, Index.read(source), source)
    checkpoints = AsyncSaves(tmp_path / "run")
    checkpoints.save(1, model_blocks(model), {})
    checkpoints.wait()
    export_checkpoint(checkpoints.open(), tmp_path / "run" / "final", config)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    state = back.state_dict()
    assert state.keys() == there.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in there.state_dict().items())
    with pytest.raises(WeightsError, match="exists already"):
        export_checkpoint(checkpoints.open(), tmp_path / "run" / "final", config)


def test_the_list_of_a_save_comes_from_one_rank_to_those_that_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came from every rank that has it, to all: those of a large run together were more than ranks may tell."""
    lists = [tmp_path / str(rank) / "step-7" / NAME for rank in range(3)]
    for path in lists[1:]:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"list" * 10)
    monkeypatch.setattr(fetch_files, "LIMIT", 50)

    def work(group: Group) -> None:
        fetch_files.bring_list(DurableDisk(), lists[group.rank].parent.parent, 7, group)

    run_ranks(local_groups(3), work)
    assert [path.read_bytes() for path in lists] == [b"list" * 10] * 3
