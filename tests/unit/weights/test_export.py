"""Export: what other libraries read back, from one rank or several, whole or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tllm.core.errors import PlanError, WeightsError
from tllm.parallel.shard import Shard, ShardPiece
from tllm.weights.byte_source import LocalFiles
from tllm.weights.export import ParameterPart, export_folder, parts_of
from tllm.weights.header_tables import INDEX, SINGLE
from tllm.weights.load import load
from tllm.weights.manifest import MANIFEST, checked
from tllm.weights.safetensors_index import Index

from .test_load import Cut, checkpoint, opened

CONFIG = {"model_type": "llama", "hidden_size": 6}


def loaded(folder: Path, size: int) -> tuple[dict[str, Tensor], dict[int, list[ParameterPart]]]:
    tensors = checkpoint()
    folder.mkdir()
    index, source = opened(folder, tensors)
    ranks = {}
    for rank in range(size):
        model = Cut(rank, size)
        load(model, index, source)
        ranks[rank] = parts_of(model)
    return {name: tensor for name, tensor in tensors.items() if name != "inv_freq"}, ranks


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_library_reads_it_back(tmp_path: Path, size: int) -> None:
    tensors, ranks = loaded(tmp_path / "in", size)
    (tmp_path / "tokenizer.json").write_text("{}")
    quantized = {**CONFIG, "quantization_config": {"quant_method": "awq"}}
    export_folder(tmp_path / "deep" / "out", quantized, ranks, others=[tmp_path / "tokenizer.json"])
    out = tmp_path / "deep" / "out"
    assert equal(load_file(out / SINGLE), tensors)
    with safe_open(out / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert {path.name for path in out.iterdir()} == {SINGLE, "config.json", MANIFEST, "tokenizer.json"}
    assert [path.name for path in out.parent.iterdir()] == ["out"], "nothing is left beside it"
    source = checked(LocalFiles(out))
    assert equal({name: Index.read(source).slice(source, name) for name in tensors}, tensors)


def test_several_files(tmp_path: Path) -> None:
    tensors, ranks = loaded(tmp_path / "in", 2)
    out = tmp_path / "out"
    out.mkdir()
    export_folder(out, CONFIG, ranks, max_shard_bytes=500)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) == 7, "four of two experts each, the fused one, three small, the last"
    together: dict[str, Tensor] = {}
    for file in files:
        content = load_file(out / file)
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 500
        assert {name: index["weight_map"][name] for name in content} == dict.fromkeys(content, file)
        together |= content
    assert equal(together, tensors)
    source = checked(LocalFiles(out))
    assert set(Index.read(source).entries) == set(tensors)


def test_another_dtype(tmp_path: Path) -> None:
    tensors, ranks = loaded(tmp_path / "in", 2)
    export_folder(tmp_path / "out", CONFIG, ranks, dtype=torch.bfloat16)
    assert equal(load_file(tmp_path / "out" / SINGLE), {name: t.to(torch.bfloat16) for name, t in tensors.items()})


def test_mixed_dtypes_lie_aligned(tmp_path: Path) -> None:
    parts = [
        ParameterPart(Shard((ShardPiece(name),)), torch.ones(3, dtype=dtype))
        for name, dtype in [("a", torch.bfloat16), ("b", torch.float64), ("c", torch.float32)]
    ]
    export_folder(tmp_path / "out", CONFIG, {0: parts})
    entries = Index.read(LocalFiles(tmp_path / "out")).entries
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries.values())


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    _, ranks = loaded(tmp_path / "in", 3)
    del ranks[0]
    with pytest.raises(PlanError, match="no rank"):
        export_folder(tmp_path / "out", CONFIG, ranks)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    _, ranks = loaded(tmp_path / "in", 1)
    before = (tmp_path / "in" / SINGLE).read_bytes()
    with pytest.raises(WeightsError, match="exists already"):
        export_folder(tmp_path / "in", CONFIG, ranks)
    assert (tmp_path / "in" / SINGLE).read_bytes() == before


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    _, ranks = loaded(tmp_path / "in", 1)
    (tmp_path / "out").mkdir()
    with pytest.raises(WeightsError, match=r"cannot write .*out"):
        export_folder(tmp_path / "out", CONFIG, ranks, others=[tmp_path / "no such file"])
    assert list((tmp_path / "out").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
