"""Models whose tokens see those after them: prompts come to what they do with `transformers`, under every plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.exaone4.modeling_exaone4 import Exaone4RMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tests.parity.engine.test_generation import LAYOUTS, LENGTHS, prompts
from tests.parity.engine.test_pooling import NOTHING, pooled, truth
from tests.support.models.families import save_model
from tllm.api.engine_options import engine_options
from tllm.cli.commands.verify import prompt_ids
from tllm.core.errors import ConfigError, ModelError, RequestError
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.planner.cost.cache_room import batch_tokens, context_of, working_bytes
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.request import PoolingKind
from tllm.spec.speculative_config import SpeculativeConfig
from tllm.training.questions.answering_model import AnsweringModel

KINDS: tuple[PoolingKind, ...] = ("last", "mean")
WIDE = EngineConfig(dtype="float64", cache_tokens=512)
ONE_OR_TWO = EngineConfig(dtype="float64", cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=47)
"""A batch with the longest prompt has room for the shortest one beside it, and for no other."""
FEW_PAGES = EngineConfig(dtype="float64", cache_tokens=48, page_size=4, max_num_seqs=4, max_num_batched_tokens=96)
CASES = ("gemma3", "qwen2", "llama")
NORMS = (Gemma2RMSNorm, Gemma3RMSNorm, Qwen2RMSNorm, LlamaRMSNorm, MistralRMSNorm, Olmo3RMSNorm, Exaone4RMSNorm)
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2_sliding": {},
    "gemma3": {},
    "olmo3": {},
    "exaone4": {},
    "deepseek_v3_moe": {"first_k_dense_replace": 4},  # latents; its experts have no products in float64 there
}


def save(case: str, folder: Path, is_causal_false: bool = False, **more: Any) -> PreTrainedModel:
    """A model that sees both ways, in float64; what goes through float32 in `transformers` does not here (`exact`)."""
    is_causal_false = is_causal_false or case != "gemma3"
    if not is_causal_false:  # of a window of 12, which counts both sides, a token sees 6 keys each way
        more = {"use_bidirectional_attention": True, "sliding_window": 12, **more}
    model = save_model(case, folder, **more)
    config = json.loads((folder / "config.json").read_text())
    if is_causal_false:
        (folder / "config.json").write_text(json.dumps({**config, "is_causal": False}))
        model.config.is_causal = False
    if case != "gemma2":  # scores that are capped are written out there too
        model.set_attn_implementation("sdpa")
    model = model.double()
    if case.startswith("gemma"):
        model.model.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5, dtype=torch.float64)
    return model


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        offset = 1.0 if isinstance(self, Gemma2RMSNorm | Gemma3RMSNorm) else 0.0
        return (self.weight + offset) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for kind in (*NORMS, DeepseekV3RMSNorm):
        monkeypatch.setattr(kind, "forward", normed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(180)
def test_every_plan_comes_to_what_transformers_does(case: str, tmp_path: Path) -> None:
    """All prompts in a batch, one or two, and with so few pages that they wait for each other; in any order."""
    model = save(case, tmp_path)
    wanted = {kind: [truth(model, kind, ids) for ids in prompts()] for kind in KINDS}
    causal = save_model(case, tmp_path / "causal").double()
    assert not torch.allclose(truth(causal, "mean", prompts()[1]), wanted["mean"][1], atol=1e-3)
    for number, layout in enumerate(LAYOUTS):
        for config in (WIDE, ONE_OR_TWO, FEW_PAGES)[number % 3 :: 2] if number else (WIDE, ONE_OR_TWO, FEW_PAGES):
            with Engine.load(tmp_path, layout, config) as engine:
                for kind in KINDS:
                    got = torch.tensor(pooled(engine, kind, prompts()), dtype=torch.float64)
                    torch.testing.assert_close(got, torch.stack(wanted[kind]), rtol=1e-8, atol=1e-8)


def test_on_a_grid_of_several_squares_a_token_sees_those_that_another_square_would_compute(tmp_path: Path) -> None:
    model = save("qwen2", tmp_path)
    wanted = torch.stack([truth(model, "mean", ids) for ids in prompts()])
    with Engine.load(tmp_path, "tp=8,tensor=2.5d", ONE_OR_TWO) as engine:
        got = torch.tensor(pooled(engine, "mean", prompts()), dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", WINDOWED)
@pytest.mark.timeout(180)
def test_windows_and_latents_that_are_not_causal_come_to_what_transformers_does(case: str, tmp_path: Path) -> None:
    """`is_causal: false`, where a window is as many keys on each side, and not half of them."""
    model = save(case, tmp_path, is_causal_false=True, **WINDOWED[case])
    wanted = torch.stack([truth(model, "mean", ids) for ids in prompts()])
    layers = spec_from_config(read_config(tmp_path)).layers
    assert {layer.window for layer in layers if layer.window} <= {13, 11}
    for layout, config in (("pp=1", ONE_OR_TWO), ("pp=2,tp=1+2", FEW_PAGES)):
        with Engine.load(tmp_path, layout, config) as engine:
            got = torch.tensor(pooled(engine, "mean", prompts()), dtype=torch.float64)
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def test_a_window_on_both_sides_with_capped_scores(tmp_path: Path) -> None:
    """Scores that are written out, as torch's product does not cap them. Softmax is in float32 in `transformers`."""
    model = save("gemma2", tmp_path, attn_logit_softcapping=2.0)
    with Engine.load(tmp_path, "pp=1", WIDE) as engine:
        got = torch.tensor(pooled(engine, "mean", prompts()), dtype=torch.float64)
    torch.testing.assert_close(got, torch.stack([truth(model, "mean", ids) for ids in prompts()]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("is_causal_false", "most"), [(False, 6), (True, 12)])
def test_a_token_sees_those_after_it_and_a_window_ends(is_causal_false: bool, most: int, tmp_path: Path) -> None:
    """By the definition, in loops: so many keys of a window of 12 each way, none beyond."""
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    save("gemma3", tmp_path, is_causal_false, **one)
    base = prompts()[2]
    with Engine.load(tmp_path, "pp=1", WIDE) as engine:
        [first] = pooled(engine, "last", [base])
        for back in (5, 6, 7, 11, 12, 13, 20):
            changed = [*base]
            changed[-1 - back] = 100 - changed[-1 - back]
            assert (pooled(engine, "last", [changed])[0] != first) == (back <= most), back


def test_a_prompt_is_as_long_as_the_context(tmp_path: Path) -> None:
    """A batch has room for the longest one, which is longer than the batches of other models."""
    model = save("gemma3", tmp_path, max_position_embeddings=1400)
    ids = [(7 * place + place // 50) % 101 for place in range(1400)]
    with Engine.load(tmp_path, "pp=2", EngineConfig(dtype="float64", cache_tokens=1408)) as engine:
        assert (engine.limits.max_model_len, engine.limits.max_num_batched_tokens) == (1400, 1400)
        got = torch.tensor(pooled(engine, "mean", [ids])[0], dtype=torch.float64)
        torch.testing.assert_close(got, truth(model, "mean", ids), rtol=1e-8, atol=1e-8)
        with pytest.raises(RequestError, match=r"1401 prompt tokens .* the context holds 1400"):
            pooled(engine, "mean", [[1] * 1401])
    save("qwen2", tmp_path, max_position_embeddings=1 << 17)
    spec = spec_from_config(read_config(tmp_path))
    assert (context_of(spec, None), batch_tokens(spec, 8192)) == (8192, 8192), "unless more is asked for"
    assert (context_of(spec, 1 << 17), batch_tokens(spec, 1 << 17)) == (1 << 17, 1 << 17)
    assert batch_tokens(replace(spec, bidirectional=False), 1 << 17) == 1024
    windowed = replace(spec, layers=tuple(replace(layer, window=512) for layer in spec.layers))
    plain, masked = (
        working_bytes(one, rank_bytes(one, Plan.parse("pp=1", spec.num_layers), "float32")[0], "float32", 8192, 1)
        for one in (spec, windowed)
    )
    assert masked - plain == 8 * 8192**2, "who sees whom, of each two tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_keys_that_are_rounded_up_are_seen_by_none(dtype: str, tmp_path: Path) -> None:
    """In 16 bits products have numbers of rows and keys up to a multiple; one prompt beside another changes nothing."""
    model = save("gemma3", tmp_path)
    config = msgspec.structs.replace(WIDE, dtype=dtype)
    with Engine.load(tmp_path, "pp=1", config) as engine:
        together = pooled(engine, "mean", prompts())
        alone = [pooled(engine, "mean", [ids])[0] for ids in prompts()]
    bound = 1e-4 if dtype == "float32" else 0.15
    for ids, one, other in zip(prompts(), together, alone, strict=True):
        want = truth(model, "mean", ids)
        for got in (one, other):
            assert (torch.tensor(got, dtype=torch.float64) - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("coding", ["int8", "fp8"])
def test_a_cache_of_codes_changes_little(coding: str, tmp_path: Path) -> None:
    model = save("qwen2", tmp_path)
    config = msgspec.structs.replace(WIDE, kv_cache_dtype=coding)
    with Engine.load(tmp_path, "pp=1", config) as engine:
        for ids, got in zip(prompts(), pooled(engine, "mean", prompts()), strict=True):
            want = truth(model, "mean", ids)
            assert (torch.tensor(got, dtype=torch.float64) - want).abs().max() <= 0.1 * want.abs().max()


def test_pages_are_nobody_elses(tmp_path: Path) -> None:
    """What a page holds depends on the tokens after it, so that a prompt with the same beginning is computed anew."""
    model = save("qwen2", tmp_path)
    longer = prompts()[-1]
    with Engine.load(tmp_path, "pp=1", WIDE) as engine:
        assert not engine.limits.enable_prefix_caching
        for ids in (longer, longer[:33], longer):
            got = torch.tensor(pooled(engine, "last", [ids])[0], dtype=torch.float64)
            torch.testing.assert_close(got, truth(model, "last", ids), rtol=1e-8, atol=1e-8)


def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    with Engine.load(tmp_path, "pp=1", ONE_OR_TWO) as engine:
        assert engine.limits.max_model_len == 47
        with pytest.raises(RequestError, match=r"it embeds and cannot write"):
            engine.generate([[1, 2]], NOTHING)
        with pytest.raises(RequestError, match=r"it embeds and cannot write"):
            pooled(engine, "logprobs", [[1, 2]])
        with pytest.raises(RequestError, match="the context holds 47"):
            pooled(engine, "mean", [[1] * 48])
        assert len(pooled(engine, "mean", [[1] * 47])[0]) == 48
    asked = msgspec.structs.replace(ONE_OR_TWO, max_model_len=48)
    with pytest.raises(ConfigError, match="max_model_len is 48 and a batch has 47 tokens") as caught:
        Engine.load(tmp_path, "pp=1", asked)
    assert "give at least 48" in caught.value.hint


def test_what_only_a_causal_model_can_do_is_refused(tmp_path: Path) -> None:
    """To tell how likely tokens are, to draft, to score completions, and to be verified by its logits."""
    save("qwen2", tmp_path)
    with pytest.raises(ConfigError, match=r"is not causal .* and does not teach"):
        AnsweringModel.find_causal(str(tmp_path), "does not teach", "")
    with pytest.raises(ConfigError, match=r"the draft model .* is not causal"):
        SpeculativeConfig(model=str(tmp_path)).draft_spec()
    with pytest.raises(ModelError, match=r"is not causal: it embeds, and makes no logits"):
        prompt_ids(argparse.Namespace(prompt_ids=None, prompt=None), engine_options(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    head = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **head}))
    with pytest.raises(ConfigError, match="is not causal"):
        AnsweringModel.find_scoring(str(tmp_path))


def test_configs_that_say_so_and_those_that_are_not_handled(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path)
    raw = read_config(tmp_path)
    assert not spec_from_config(raw).bidirectional
    both = spec_from_config({**raw, "use_bidirectional_attention": True, "sliding_window": 512})
    assert both.bidirectional and {layer.window for layer in both.layers} == {257, None}
    for both_ways, window in ((False, 513), (True, 258)):
        more = {"is_causal": False, "use_bidirectional_attention": both_ways, "sliding_window": 512}
        spec = spec_from_config({**raw, **more})
        assert spec.bidirectional and {layer.window for layer in spec.layers} == {window, None}
    save_model("gemma2", tmp_path)
    with pytest.raises(ModelError, match="use_bidirectional_attention of a gemma2 model"):
        spec_from_config({**read_config(tmp_path), "use_bidirectional_attention": True})
    save_model("qwen3_next_moe", tmp_path)
    with pytest.raises(ModelError, match=r"layers have a state is not handled: it holds what came before a token"):
        spec_from_config({**read_config(tmp_path), "is_causal": False})


assert LENGTHS[0] + LENGTHS[-1] <= 47 < LENGTHS[0] + LENGTHS[-1] + LENGTHS[1]
