"""Values of a `config.json` as `transformers` writes and reads them: ties, names of one number, wrong kinds."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.models.families import FAMILIES, SHAPE, random_model, save_model
from tllm.core.errors import ModelError, WeightsError
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.quantized.weight_form import QUANTIZE
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load

WRONG = (None, [], [1], ["a"], {}, {"a": 1}, "x", True, -1, 0.5, math.nan, math.inf, 10**400, [[]])


def written(case: str) -> dict[str, Any]:
    """The `config.json` of a family's model."""
    prefix, own = FAMILIES[case]
    shape = {**SHAPE, **own}
    shape = dict(text_config=shape) if prefix == "Qwen3VL" else shape
    found: dict[str, Any] = json.loads(getattr(transformers, f"{prefix}Config")(**shape).to_json_string())
    found.pop("vision_config", None)
    return found


def places(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("case", FAMILIES)
def test_a_value_of_a_wrong_kind_is_one_clear_error(case: str) -> None:
    """Or it is not looked at; nothing else comes of it. Every key of every family, also those inside tables.

    Each meets a third of the values, and over all families a key that several have meets all.
    """
    config = written(case)
    spec_from_config(config)
    first = list(FAMILIES).index(case)
    for number, path in enumerate(places(config), first):
        for value in WRONG[number % 3 :: 3]:
            check_value(config, path, value)


def check_value(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    damaged = copy.deepcopy(config)
    table = damaged
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    try:
        spec_from_config(damaged)
    except ModelError:
        return
    except Exception as error:
        raise AssertionError(f"{'.'.join(path)}={str(value)[:40]}") from error


def loaded(folder: Path, config: dict[str, Any]) -> Transformer:
    spec, source = spec_from_config(config), LocalFiles(folder)
    model = build(spec, whole(spec), torch.float32)
    load(model, open_index(source, config), source)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_beside_a_table_that_is_said_to_be_the_head(dtype: torch.dtype, tmp_path: Path) -> None:
    """An equal one is not needed. With another one `transformers` does not tie, and here a line says what to change."""
    save_model("llama_mha_tied_bias", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: x.to(dtype) for name, x in load_file(file).items()}
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, file, {"format": "pt"})
    raw = read_config(tmp_path)
    loaded(tmp_path, raw)
    loaded(tmp_path, {**raw, QUANTIZE: "int8"})
    head = table.clone()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)
    for wish in ({}, {QUANTIZE: "int8"}):
        with pytest.raises(WeightsError, match=r"lm_head\.weight of the files is not") as refused:
            loaded(tmp_path, {**raw, **wish})
        assert "tie_word_embeddings to false" in refused.value.hint
    mine = loaded(tmp_path, {**raw, "tie_word_embeddings": False})
    assert torch.equal(mine.lm_head.weight, theirs.lm_head.weight.float())


@pytest.mark.parametrize("prefix", ["Qwen3VL", "Qwen3_5", "Gemma3"])
def test_the_whole_says_whether_its_text_part_is_tied(prefix: str, tmp_path: Path) -> None:
    """What the text part says counts where the whole says nothing, and never against the files."""
    own: dict[str, Any] = FAMILIES["qwen3_5"][1] if prefix == "Qwen3_5" else {}
    random_model(prefix, tmp_path, **own)
    raw = json.loads((tmp_path / "config.json").read_text())
    for of_whole, of_text in itertools.product((None, True, False), (None, True, False)):
        for table, value in ((raw, of_whole), (raw["text_config"], of_text)):
            table.pop("tie_word_embeddings", None)
            table.update({} if value is None else {"tie_word_embeddings": value})
        (tmp_path / "config.json").write_text(json.dumps(raw))
        tied = spec_from_config(read_config(tmp_path)).tied
        with torch.device("meta"):
            known = transformers.AutoConfig.from_pretrained(tmp_path)
            theirs = getattr(transformers, f"{prefix}ForConditionalGeneration")(known)
        is_one = theirs.lm_head.weight is theirs.get_input_embeddings().weight
        assert tied == (is_one if of_whole is not None or of_text is None else of_text), (of_whole, of_text)


@pytest.mark.parametrize(
    "case", ["qwen3_moe", "glm4_moe", "gpt_oss_moe", "minimax_m2_moe", "mixtral", "deepseek_v2_moe"]
)
def test_two_names_of_one_number_agree(case: str) -> None:
    config = written(case)
    spec = spec_from_config(config)
    names = {key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config}
    count = config[names.pop()]
    for name in ("num_experts", "num_local_experts"):
        assert spec_from_config({**config, name: count}) == spec
        if name not in config:
            with pytest.raises(ModelError, match="are to be the same"):
                spec_from_config({**config, name: count + 1})


def test_keys_that_say_what_holds_without_them() -> None:
    """A rope of all layers in olmo3, of which `transformers` reads nothing, and Falcon3's name of its MLP."""
    shape = {**SHAPE, "head_dim": 6}
    flat = dict(rope_type="default", rope_theta=5e5)
    known = transformers.Olmo3Config(**shape, rope_parameters=dict(flat)).rope_parameters
    assert known["full_attention"] == known["sliding_attention"] == flat
    olmo = dict(shape, model_type="olmo3", rms_norm_eps=1e-6)
    assert spec_from_config({**olmo, "rope_parameters": flat}) == spec_from_config(olmo)
    for unlike in (dict(flat, rope_theta=1e4), dict(flat, rope_type="linear", factor=2.0)):
        ignored = transformers.Olmo3Config(**shape, rope_parameters=dict(unlike)).rope_parameters
        assert ignored["full_attention"] == flat
        with pytest.raises(ModelError, match="is not handled"):
            spec_from_config({**olmo, "rope_parameters": unlike})
    llama = written("llama")
    assert spec_from_config({**llama, "activation": "swiglu"}) == spec_from_config(llama)
    with pytest.raises(ModelError, match="activation='gelu'"):
        spec_from_config({**llama, "activation": "gelu"})
