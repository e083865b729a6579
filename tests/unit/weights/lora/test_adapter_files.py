"""An adapter's folder: what is read of it, and folders that are torn, of another model, or hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tllm.core.errors import ConfigError, WeightsError
from tllm.spec.lora.lora_config import CONFIG_LIMIT
from tllm.weights.byte_source import LocalFiles
from tllm.weights.byte_spans import Spans
from tllm.weights.lora.adapter_files import read_adapter
from tllm.weights.lora.held_adapter import HeldAdapter, HeldFiles

Q = "model.layers.0.self_attn.q_proj"
SHAPES = {Q: (12, 8), "model.layers.1.mlp.down_proj": (8, 20)}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {}
    for name, (outputs, inputs) in SHAPES.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(3, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 3)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(dict(peft_type="LORA", r=3, target_modules=["q_proj", "down_proj"])))
    return tmp_path


def test_an_adapter_is_read_and_has_an_id_of_all_that_it_is(folder: Path) -> None:
    held = HeldAdapter.read("name", folder, SHAPES, 3)
    assert held.adapter.modules.keys() == SHAPES.keys() and held.adapter.max_rank == 3
    assert held.elements(range(1)) == 3 * (12 + 8)
    assert held.elements(range(1, 2)) == 3 * (8 + 20)
    assert (
        held.lora == HeldAdapter.read("name", folder, SHAPES, 3).lora != HeldAdapter.read("b", folder, SHAPES, 3).lora
    )
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0] += 1
    save_file(tensors, folder / WEIGHTS)
    assert HeldAdapter.read("name", folder, SHAPES, 3).lora != held.lora


@pytest.mark.parametrize("written", ["model.language_model.layers", "layers"])
def test_names_of_a_whole_that_also_sees_or_lacks_its_head_are_those_of_the_text_part(
    written: str, folder: Path
) -> None:
    tensors = {name.replace("model.layers", written): x for name, x in load_file(folder / WEIGHTS).items()}
    assert all(name.startswith(f"base_model.model.{written}.") for name in tensors)
    save_file(tensors, folder / WEIGHTS)
    assert read_adapter(LocalFiles(folder)).modules.keys() == SHAPES.keys()


def _renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {name.replace(old, new): x for name, x in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS)

    return change


def _without(end: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {name: x for name, x in load_file(folder / WEIGHTS).items() if not name.endswith(end)}
        save_file(tensors, folder / WEIGHTS)

    return change


def _config(**keys: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **keys}))

    return change


def _torn(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4])


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _long(folder: Path) -> None:
    (folder / CONFIG).write_bytes(b" " * (CONFIG_LIMIT + 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_renamed(".self_attn.q_proj", ".self_attn.kv_b_proj"), "target_modules"),
        (
            _renamed("model.layers.0.self_attn.q_proj", "model.layers.7.self_attn.q_proj"),
            "layers.7.self_attn.q_proj, and",
        ),
        (_renamed(".lora_A.weight", ".lora_embedding_A"), "lora_embedding_A"),
        (_renamed("base_model.model.model.layers.0", "other.model.layers.0"), "'other.model.layers.0"),
        (_renamed(".lora_B.weight", ".lora_magnitude_vector"), "lora_magnitude_vector"),
        (_without("q_proj.lora_B.weight"), "lacks model.layers.0.self_attn.q_proj.lora_B.weight"),
        (_without("weight"), "has no tensor"),
        (_config(r=2), "needs (2, 8)"),
        (_config(target_modules=["q_proj"]), "does not name it"),
        (_config(use_dora=True), "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        (_torn, "adapter_model.safetensors"),
        (_pickled, "there is no adapter_model.safetensors"),
        (_long, "1048577 bytes"),
        (lambda folder: (folder / CONFIG).unlink(), "there is no adapter_config.json"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(folder: Path, change: Callable[[Path], None], words: str) -> None:
    change(folder)
    with pytest.raises(WeightsError) as caught:
        HeldAdapter.read("name", folder, SHAPES, 16)
    assert words in caught.value.message


def test_a_rank_that_is_not_served_is_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="rank 3 and adapters up to rank 2"):
        HeldAdapter.read("name", folder, SHAPES, 2)


def test_held_files_give_their_bytes_and_no_others() -> None:
    files = HeldFiles({"a": bytes(range(10))})
    out = bytearray(4)
    files.read_spans("a", Spans(1, 2, 4, 2), memoryview(out))
    assert (bytes(out), files.size("a"), files.bytes_read) == (bytes((1, 2, 5, 6)), 10, 4)
    with pytest.raises(WeightsError, match="it has 10"):
        files.read("a", 5, 11)
    with pytest.raises(WeightsError, match="no file"):
        files.size("../a")
