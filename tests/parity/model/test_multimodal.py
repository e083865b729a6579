"""The text part of checkpoints that also see: their names and nested configs, served, and trained into a text model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.engine.test_generation import DRAFTED, GREEDY, greedy_truth, prompts
from tests.support.models.families import FAMILIES, random_model
from tests.support.models.slow_load import names_read
from tllm.engine.engine import Engine
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import GEMMA3, read_config
from tllm.weights.byte_source import LocalFiles
from tllm.weights.export import export_folder, parts_of
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load

WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3": dict(
        sliding_window=12, query_pre_attn_scalar=12, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "Gemma4": dict(FAMILIES["gemma4_moe"][1], pad_token_id=0),
    "Mistral3": dict(model_type="mistral", sliding_window=None),
    "Qwen3VL": {},
    "Qwen3_5": FAMILIES["qwen3_5"][1],
}


@pytest.mark.parametrize("prefix", WHOLE)
def test_greedy_ids_of_the_text_part(prefix: str, tmp_path: Path) -> None:
    truth = greedy_truth(random_model(prefix, tmp_path, **WHOLE[prefix]))
    for layout in ("pp=1", "pp=2,tp=1+2"):
        with Engine.load(tmp_path, layout, DRAFTED) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, layout


@pytest.mark.parametrize("prefix", WHOLE)
def test_what_is_written_is_a_text_model(prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaded and exported as training does it: `transformers` reads a text model with the same logits."""
    caplog.set_level(logging.INFO, logger="tllm.model")  # which `tllm models` of another test has quietened
    truth = random_model(prefix, tmp_path / "whole", **WHOLE[prefix])
    raw = read_config(tmp_path / "whole")
    assert read_config(tmp_path / "whole") == raw
    assert [record.message.count("only the text part") for record in caplog.records] == [1], "said once"
    spec = spec_from_config(raw)
    model = build(spec, whole(spec), torch.float32)
    source = LocalFiles(tmp_path / "whole")
    index = open_index(source, raw)
    load(model, index, source)
    assert names_read(model, index) == set(index.entries)
    assert not any("vis" in name or "language_model" in name for name in index.entries)
    export_folder(tmp_path / "text", raw, {0: parts_of(model)})
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == raw["model_type"]
    if prefix != "Qwen3VL":  # whose text part transformers has no causal model of
        text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
        ids = torch.tensor(prompts()[2])[None]
        with torch.inference_mode():
            torch.testing.assert_close(text(ids).logits, truth(ids).logits, rtol=0, atol=2e-6)


def test_what_published_files_leave_out_is_as_transformers_fills_it_in() -> None:
    known = transformers.Gemma3TextConfig()
    assert {key: getattr(known, key) for key in GEMMA3} == GEMMA3
