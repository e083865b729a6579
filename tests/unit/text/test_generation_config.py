"""Defaults of sampling: where they are read, which count, and who takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tllm.core.errors import ConfigError
from tllm.text.generation_config import SAMPLING, GenerationConfig, effective_temperature, read_generation_config

FILE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "do_sample": True, "eos_token_id": [2, 3]}
READ = GenerationConfig(temperature=0.6, top_k=20, top_p=0.95)


def folder(path: Path, values: Any = FILE) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_a_folder_recommends_and_who_serves_decides(tmp_path: Path) -> None:
    model, other = folder(tmp_path / "model"), folder(tmp_path / "other", {"max_new_tokens": 100})
    (bare := tmp_path / "bare").mkdir()
    assert read_generation_config(model) == READ
    assert read_generation_config(model, "vllm") == read_generation_config(bare) == GenerationConfig()
    assert read_generation_config(model, str(other)) == GenerationConfig(max_new_tokens=100)
    asked = '{"top_k": -1, "temperature": 1}'
    assert read_generation_config(model, override=asked).given == {"temperature": 1, "top_k": -1, "top_p": 0.95}
    assert read_generation_config(model, "vllm", {"min_p": 0.1}) == GenerationConfig(min_p=0.1)


def test_a_gguf_file_says_it_in_its_header(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.add_float32("general.sampling.penalty_repeat", 1.05)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_generation_config(tmp_path / "m.gguf")
    assert found.given == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def test_what_cannot_be_is_named_with_the_place_where_it_stands(tmp_path: Path) -> None:
    for wrong in ({"temperature": "warm"}, {"top_p": 1.5}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match=f"generation_config.json.*{next(iter(wrong))}"):
            read_generation_config(folder(tmp_path / "model", wrong))
    for asked, said in (("{", "not JSON"), ("[]", "object"), ('{"top_p": 0}', "top_p"), ('{"topk": 1}', "topk")):
        with pytest.raises(ConfigError, match=f"override-generation-config.*{said}"):
            read_generation_config(tmp_path, override=asked)
    with pytest.raises(ConfigError, match="nowhere"):
        read_generation_config(tmp_path, str(tmp_path / "nowhere"))


def test_greedy_requests_take_none_of_it() -> None:
    config = GenerationConfig(temperature=0.6, top_k=20, repetition_penalty=1.05)
    mine = {"temperature": 0.9, "top_k": 20, "top_p": 0.5, "min_p": None, "repetition_penalty": 1.05}
    assert config.fill({"temperature": 0.9, "top_p": 0.5}) == mine
    assert config.fill({"temperature": 0.0})["repetition_penalty"] is None
    assert config.fill({})["temperature"] == 0.6


def test_a_temperature_that_means_0_is_0_whoever_says_it() -> None:
    config = GenerationConfig(temperature=1e-6, top_k=20)
    assert config.fill({}) == {**dict.fromkeys(SAMPLING), "temperature": 0.0, "top_k": 20}
    assert config.fill({"temperature": 9e-6}) == {**dict.fromkeys(SAMPLING), "temperature": 0.0}
    assert config.fill({"temperature": 1e-5}) == {**dict.fromkeys(SAMPLING), "temperature": 1e-5, "top_k": 20}
    assert effective_temperature(-1) == -1, "it is refused elsewhere"
