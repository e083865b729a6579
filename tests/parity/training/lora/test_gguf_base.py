"""A GGUF file as what a run begins with: trained further, adapted beside, merged into, and known again."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.parity.training.lora.test_lora import lora_job
from tests.parity.training.lora.test_quantized_lora import gradients
from tests.support.models.families import save_model
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tests.support.training.post_training.short_letters import TINY
from tests.support.training.runs import final, job_for, records, train
from tllm.core.errors import ConfigError
from tllm.spec.gguf.gguf_codings import TYPES
from tllm.text.generation_config import read_generation_config
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.merged_model import write_merged
from tllm.training.rollout_servers.base_digest import base_digest, has_weights
from tllm.weights.byte_source import LocalFiles
from tllm.weights.lora.adapter_files import read_adapter
from tllm.weights.lora.sampled_digest import sampled_digest

SHAPE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96)
LORA = LoraJob(r=2, lora_alpha=8.0)


def four_bits(name: str) -> str:
    return "F32" if "token_embd" in name else "Q4_0"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file with weights of four bits, and a folder of the numbers that they stand for."""
    folder = tmp_path_factory.mktemp("bases")
    truth = save_model("llama", folder / "drawn", **SHAPE)
    path = write_gguf(truth, folder / "model.gguf", four_bits)
    truth.save_pretrained(folder / "plain")
    return path, folder / "plain"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def check_same(jobs: Sequence[Job], plan: str) -> None:
    """Losses and the finished weights of two runs."""
    ours, theirs = (records(train(job, plan)) for job in jobs)
    assert [one.loss for one in ours] == pytest.approx([one.loss for one in theirs], rel=0, abs=1e-10)
    found, wanted = (final(Path(job.output_dir)) for job in jobs)
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, wanted[name], rtol=0, atol=1e-10)


def test_an_adapter_beside_a_file_is_that_beside_its_numbers(bases: tuple[Path, Path], tmp_path: Path) -> None:
    """And merged into either it gives one model, which transformers opens."""
    path, plain = bases
    named = {"packed": path, "plain": plain}
    more: dict[str, Any] = dict(lora=LORA, dtype="float64", max_steps=3)
    check_same([lora_job(base, tmp_path / name, **more) for name, base in named.items()], "pp=2")
    assert read_adapter(LocalFiles(tmp_path / "packed/final")).base == sampled_digest(LocalFiles(path)) != ""
    for name, base in named.items():
        write_merged(base, tmp_path / f"merged-{name}", [tmp_path / name / "final"], "float64")
    merged, other = tensors_of(tmp_path / "merged-packed"), tensors_of(tmp_path / "merged-plain")
    assert merged.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=1e-10) for name, x in merged.items())
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged-packed")
    assert torch.equal(opened.model.norm.weight, merged["model.norm.weight"])


def test_few_bits_of_a_file_stay_so_beside_an_adapter(bases: tuple[Path, Path], tmp_path: Path) -> None:
    """Their products round inputs to 8 bits, in each of two stages as in one."""
    loss, named = gradients(bases[0], "float32", LORA)  # which looks at whether they stay packed
    exact, wanted = gradients(bases[0], "float64", LORA)
    assert abs(loss - exact) < 0.02 * exact and named.keys() == wanted.keys()
    assert len(records(train(lora_job(bases[0], tmp_path / "run", lora=LORA, max_steps=2), "dp=2,pp=2"))) == 2


def test_a_whole_model_is_trained_from_a_file(bases: tuple[Path, Path], tmp_path: Path) -> None:
    named = zip(("packed", "plain"), bases, strict=True)
    check_same([job_for(base, tmp_path / name, dtype="float64", max_steps=2) for name, base in named], "pp=1")
    assert TYPES not in json.loads((tmp_path / "packed/final/config.json").read_text()), "its weights are plain numbers"


def test_another_file_of_the_same_shape_is_noticed(
    bases: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = bases
    train(lora_job(path, tmp_path / "run", lora=LORA, max_steps=1), "pp=1")
    with caplog.at_level(logging.WARNING, "tllm.model"):
        write_merged(path, tmp_path / "same", [tmp_path / "run/final"])
        assert not caplog.records
        write_merged(plain, tmp_path / "other", [tmp_path / "run/final"])
    assert "was trained beside other weights" in caplog.text
    other = write_gguf(save_model("llama", tmp_path / "drawn", seed=3, **SHAPE), tmp_path / "model.gguf", four_bits)
    assert has_weights(path) and has_weights(plain)
    assert base_digest(path) == base_digest(path) != base_digest(other), "as machines that sample compare theirs"
    with pytest.raises(ConfigError, match="began beside other weights of this shape"):
        open_initial_model(lora_job(other, tmp_path / "run", lora=LORA, max_steps=1))


def test_what_the_header_says_of_texts_goes_with_the_run(tmp_path: Path) -> None:
    """The tokenizer, its template, and how tokens are chosen."""

    def more(writer: gguf.GGUFWriter) -> None:
        with_tokenizer(TINY)(writer)
        writer.add_float32("general.sampling.temp", 0.5)

    path = write_gguf(SavedModel(TINY), tmp_path / "tiny.gguf", metadata=more)
    job = job_for(path, tmp_path / "run")
    initial, own = open_initial_model(job), Tokenizer.from_folder(path)
    assert own is not None and initial.tokenizer is not None and initial.chat_template is not None
    text = "def main():\n    return 1"
    assert initial.tokenizer.encode(text) == own.encode(text)
    assert initial.tokenizer.eos_ids == own.eos_ids and initial.tokenizer.special_tokens == own.special_tokens
    write_merged(path, tmp_path / "folder")
    assert read_generation_config(tmp_path / "folder").temperature == 0.5
    assert Tokenizer.from_folder(tmp_path / "folder").encode(text) == own.encode(text)  # type: ignore[union-attr]
    assert open_initial_model(job).config == initial.config, "it goes on"
