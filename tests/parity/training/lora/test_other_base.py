"""An adapter knows the weights that it was trained beside: others of the same shape are noticed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.parity.training.lora.test_lora import lora_job
from tests.support.models.families import save_model
from tests.support.training.runs import train
from tllm.core.errors import ConfigError
from tllm.node.weights.model_folder import ModelFolder
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.merged_model import write_merged
from tllm.weights.byte_source import LocalFiles
from tllm.weights.lora.adapter_files import read_adapter
from tllm.weights.lora.sampled_digest import sampled_digest

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a finished run of an adapter beside it."""
    folder = tmp_path_factory.mktemp("folders")
    save_model("llama", folder / "base")
    train(lora_job(folder / "base", folder / "run", lora=LoraJob(r=2), max_steps=1), "pp=1")
    return folder / "base", folder / "run"


def test_an_adapter_keeps_a_digest_of_its_base(folders: tuple[Path, Path]) -> None:
    base, run = folders
    kept = read_adapter(LocalFiles(run / "final")).base
    assert len(kept) == 64 and kept == sampled_digest(LocalFiles(base))
    truth = save_model("llama", run / "again")
    assert PeftModel.from_pretrained(truth, str(run / "final")), "PEFT passes over it"


def test_a_digest_is_of_the_numbers_and_not_of_how_files_are_cut(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[0] / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-0.safetensors": names[:5], "model-1.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "consolidated.safetensors").write_text("version https://git-lfs.github.com: it is not of the model")
    want = sampled_digest(LocalFiles(folders[0]))
    assert sampled_digest(LocalFiles(tmp_path)) == want
    tensors[names[7]].view(-1)[0] += 1e-3
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "model-1.safetensors")
    assert sampled_digest(LocalFiles(tmp_path)) != want
    assert ModelFolder(tmp_path).is_another_base(want) and not ModelFolder(folders[0]).is_another_base(want)
    assert not ModelFolder(tmp_path).is_another_base(""), "an adapter of others says nothing"


def trained_further(base: Path, folder: Path) -> Path:
    """The model of a folder with other numbers."""
    folder.mkdir()
    tensors = {name: x + 0.01 * torch.randn(x.shape) for name, x in load_file(base / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def test_merging_into_another_base_is_warned_of(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, run = folders
    other = trained_further(base, tmp_path / "other")
    with caplog.at_level(logging.WARNING, "tllm.model"):
        write_merged(base, tmp_path / "merged", [run / "final"])
        assert not caplog.records
        write_merged(other, tmp_path / "mixed", [run / "final"])
    (record,) = caplog.records
    assert "final was trained beside other weights than these, though of the same shape" in record.getMessage()


def test_a_run_does_not_go_on_beside_another_base(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = folders
    job = lora_job(base, tmp_path / "run", lora=LoraJob(r=2), max_steps=1)
    assert open_initial_model(job).base == open_initial_model(job).base == sampled_digest(LocalFiles(base))
    further = trained_further(base, tmp_path / "other")
    other = lora_job(further, tmp_path / "run", lora=LoraJob(r=2), max_steps=1)
    with pytest.raises(ConfigError, match="began beside other weights of this shape") as caught:
        open_initial_model(other)
    assert "remove" in (caught.value.hint or "")
    (tmp_path / "run" / "start" / "base_sha256").unlink()
    assert open_initial_model(other).base == sampled_digest(LocalFiles(further))
