"""Models whose weights are rounded while they load: what layouts share, and how far the answers are from exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.families import save_model
from tests.support.models.few_bits import libraries
from tests.support.models.gguf_models import write_gguf
from tests.support.models.layouts import spec_of
from tests.support.models.quantized_folders import FORMATS, fp8, save_mxfp4, save_quantized
from tests.support.selection import EACH_PART, covering, in_turn, soak_but
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.kernels import library as kernel_library
from tllm.kernels.library import Library
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.parallel.quantized_weight import weight_bytes
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_form import Quantize, with_weight_form
from tllm.spec.request import Request, SamplingParams
from tllm.weights.byte_source import LocalFiles
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import HeldAs, load

CONFIG = EngineConfig(dtype="float32", cache_tokens=1024, max_num_seqs=8)
SCORED = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
SIZES = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=256)
"""Heads and widths of whole groups of 32, so that ranks round the activations of the same columns together."""

EXPERTS = dict(SIZES, moe_intermediate_size=128)
FAMILIES = {
    "llama": SIZES,
    "gemma2": SIZES,
    "qwen2_moe": dict(EXPERTS, shared_expert_intermediate_size=128),
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS,
    "gpt_oss_moe": SIZES,
    "gemma4_moe": dict(EXPERTS, global_head_dim=32, num_global_key_value_heads=2),
}
"""Dense models, and experts chosen by softmax (beside a gated one that is shared), by corrected sigmoids in groups, and
by the softmax of those chosen; experts beside an MLP."""

SEEDS = {"glm4_moe": 1, "gemma4_moe": 1}
"""Of a model whose reply repeats itself, so that something is drafted; and of one whose first tokens' experts are not
chosen by a hair."""

PROMPT = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(7)).tolist()
KINDS: tuple[Quantize, ...] = ("int8", "int4")
EACH_WITH_A_KIND = pytest.mark.parametrize(("folder", "kind"), covering(FAMILIES, KINDS), indirect=["folder"])
"""Bits are a matter of a product, and the parts that have products of their own are among the families of each kind."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path, seed=SEEDS.get(request.param, 0), **FAMILIES[request.param])
    return path


def scored(folder: Path, layout: str, config: EngineConfig) -> tuple[list[int], list[float]]:
    """The ids of a reply, and the log-probabilities of the prompt's tokens and of these."""
    with Engine.load(folder, layout, config) as engine:
        outputs = list(engine.submit(Request(id="one", prompt_ids=tuple(PROMPT), params=SCORED)))
    ids = [token for out in outputs for token in out.token_ids]
    found = [one for out in outputs for one in (*out.prompt_logprobs, *out.logprobs)]
    return ids, [one.logprob for one in found if one]


def layouts(family: str) -> tuple[str, ...]:
    """Ways to cut a model."""
    spread = ("tp=2,experts=spread", "tp=3,shares=1:2:1,experts=spread") if "moe" in family else ()
    return ("pp=3,layers=1+2+1", "tp=2", "pp=2,tp=2", "tp=3,shares=1:2:1", *spread)


def distance(some: list[float], others: list[float]) -> float:
    """Root mean square of the differences of log-probabilities."""
    return float((torch.tensor(some) - torch.tensor(others)).square().mean().sqrt())


@EACH_PART
@EACH_WITH_A_KIND
def test_every_layout_answers_alike(folder: Path, kind: Quantize, part: str) -> None:
    """To the bit, however stages, ranks and experts are cut."""
    config = msgspec.structs.replace(CONFIG, quantize=kind)
    wanted = scored(folder, "pp=1", config)
    family = next(family for family in FAMILIES if folder.name.startswith(family))
    for layout in in_turn(layouts(family), family, FAMILIES, part):
        assert scored(folder, layout, config) == wanted, layout


@EACH_WITH_A_KIND
def test_answers_are_those_of_the_rounded_weights(folder: Path, kind: Quantize) -> None:
    """Held as plain numbers in float64: what differs is the rounding of activations to 8 bits.

    That may choose another expert for a token now and then, and its scores are then far off: half of them are near.
    """
    config = msgspec.structs.replace(CONFIG, quantize=kind)
    _, chances = scored(folder, "pp=1", config)
    exact = msgspec.structs.replace(config, dequantize=True, dtype="float64")
    _, wanted = scored(folder, "pp=1", exact)
    prompt = len(PROMPT) - 1  # of the reply, tokens may differ
    off = (torch.tensor(chances[:prompt]) - torch.tensor(wanted[:prompt])).abs()
    assert off.median() < 0.03 if "moe" in folder.name else off.square().mean().sqrt() < 0.05
    _, plain = scored(folder, "pp=1", msgspec.structs.replace(CONFIG, dtype="float64"))
    rounding = distance(plain[:prompt], wanted[:prompt])
    assert (0.005 if kind == "int8" else 0.1) < rounding < (0.1 if kind == "int8" else 0.8), "weights are rounded"


@EACH_WITH_A_KIND
def test_every_instruction_set_answers_with_the_same_bits(
    folder: Path, kind: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply, its log-probabilities and those of its prompt."""
    config = msgspec.structs.replace(CONFIG, quantize=kind)

    def answers(library: Library) -> tuple[list[int], list[float]]:
        monkeypatch.setattr(kernel_library, "loaded", lambda: library)
        return scored(folder, "pp=1", config)

    first, *others = [answers(library) for library in libraries()]
    assert others and all(other == first for other in others)


@pytest.mark.parametrize(("folder", "kv_cache_dtype"), covering(FAMILIES, ["auto", "int8"]), indirect=["folder"])
def test_answers_have_the_same_bits_however_they_come_about(folder: Path, kv_cache_dtype: str) -> None:
    """Prompts whole or in pieces, computed or found in the cache, alone or beside others, begun again, with drafts."""
    config = msgspec.structs.replace(CONFIG, quantize="int4", page_size=4, kv_cache_dtype=kv_cache_dtype)
    reply = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
    prompts = [PROMPT[:count] * 2 for count in (40, 33, 25, 17)]

    def answers(config: EngineConfig, layout: str, turns: int = 1) -> tuple[list[object], dict[str, float]]:
        with Engine.load(folder, layout, config) as engine:
            for turn in range(turns):
                asked = [Request(id=f"{turn} {i}", prompt_ids=tuple(p), params=reply) for i, p in enumerate(prompts)]
                streams = [engine.submit(request) for request in asked]
                found = [[(out.token_ids, out.logprobs) for out in stream] for stream in streams]
            tokens = [[token for ids, _ in one for token in ids] for one in found]
            scores = [[score for _, some in one for score in some] for one in found]
            return [tokens, scores], engine.stats()

    alone, _ = answers(msgspec.structs.replace(config, max_num_seqs=1, enable_prefix_caching=False), "pp=1")
    pieces, _ = answers(msgspec.structs.replace(config, max_num_seqs=4, max_num_batched_tokens=11), "pp=1")
    assert pieces == alone
    found, stats = answers(config, "tp=2", turns=2)
    assert found == alone and stats["prefix_hits"] > 100
    tight = msgspec.structs.replace(config, cache_tokens=160, max_num_seqs=4, max_num_batched_tokens=48)
    anew, stats = answers(tight, "pp=2")
    assert anew == alone and stats["preemptions"] > 0, "the cache was meant to be too small"
    drafted, stats = answers(msgspec.structs.replace(config, num_speculative_tokens=4), "pp=1")
    assert drafted == alone and stats["draft_tokens"] > 0


def test_weights_are_rounded_alike_wherever_they_are_cut(folder: Path) -> None:
    """As plain numbers: the rounding itself does not depend on the cut."""
    config = msgspec.structs.replace(CONFIG, quantize="int4", dequantize=True, dtype="float64")
    ids, chances = scored(folder, "pp=1", config)
    found, near = scored(folder, "tp=3,shares=1:2:1", config)
    assert found == ids and near == pytest.approx(chances, abs=1e-10)


def held_bytes(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a loaded model's weights take, and those that are planned."""
    spec, source = spec_from_config(config), LocalFiles(folder)
    model = build(spec, whole(spec), torch.bfloat16, "meta")
    load(model, open_index(source, config), source, torch.bfloat16, held=HeldAs(packed=True))
    (planned,) = rank_bytes(spec, Plan.parse("pp=1", spec.num_layers), "bfloat16")
    return sum(weight_bytes(parameter) for parameter in model.parameters()), planned.weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_take_the_bytes_that_are_planned(folder: Path, kind: Quantize) -> None:
    held, planned = held_bytes(folder, with_weight_form(read_config(folder), kind))
    spec = spec_of(folder)
    padded = -spec.vocab_size % 16 * spec.hidden_size * 8.5 / 8  # of the table of the logits, the last block
    assert held - planned == pytest.approx(padded, abs=1)


def test_a_tied_table_is_rounded_though_the_files_have_a_head_too(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **SIZES, vocab_size=128, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    held, planned = held_bytes(tmp_path, with_weight_form(read_config(tmp_path), "int8"))
    assert held == planned


FOLDERS = {
    "fp8": fp8(128, 128),
    "fp8_powers": fp8(128, 128, powers=True),
    **{form: FORMATS[form] for form in ("fp8_row", "awq", "int4_asymmetric")},
}


@EACH_PART
@pytest.mark.parametrize(
    ("family", "form"), [("llama", "fp8"), ("llama", "fp8_row"), *(("qwen3_moe", form) for form in FOLDERS)]
)
def test_quantised_folders_are_held_as_they_are(family: str, form: str, part: str, tmp_path: Path) -> None:
    """Every layout answers alike, to the bit, also where it cuts inside of blocks of 128 columns."""
    save_model(family, tmp_path / "plain", **FAMILIES[family], vocab_size=128)
    folder = tmp_path / form
    save_quantized(tmp_path / "plain", folder, FOLDERS[form])
    held, planned = held_bytes(folder, read_config(folder))
    assert held == planned
    save_quantized(tmp_path / "plain", folder, FOLDERS[form], head=True)
    found = scored(folder, "pp=1", CONFIG)
    for layout in in_turn(layouts(family), form, FOLDERS, part):
        assert scored(folder, layout, CONFIG) == found, layout
    exact = msgspec.structs.replace(CONFIG, dequantize=True, dtype="float64")
    off = torch.tensor(found[1][:39]) - torch.tensor(scored(folder, "pp=1", exact)[1][:39])
    assert off.abs().median() < 0.03


def test_stacked_experts_of_a_gguf_file(tmp_path: Path) -> None:
    """Of other types than those beside them."""
    kinds = {"down_exps": "Q4_0", "up_exps": "Q8_0", "gate_exps": "MXFP4"}

    def kind(name: str) -> str:
        return next((kinds[part] for part in kinds if part in name), "F32" if "gate_inp" in name else "Q8_0")

    truth = save_model("qwen3_moe", tmp_path / "plain", **EXPERTS, decoder_sparse_step=1)
    path = write_gguf(truth, tmp_path / "model.gguf", kind)
    found = scored(path, "pp=1", CONFIG)
    for layout in layouts("qwen3_moe")[2::3]:
        assert scored(path, layout, CONFIG) == found, layout


WRITTEN = dict(swiglu_limit=7.0, swiglu_alpha=1.702)
"""What every gpt-oss model has, so that no GGUF file says it."""


UPS = ("MXFP4", "Q4_0", "F16")


@EACH_PART
@pytest.mark.parametrize("up", soak_but(UPS[:2], UPS))
def test_gates_and_ups_of_a_gguf_file_become_one_matrix(up: str, part: str, tmp_path: Path) -> None:
    """To the bit under every layout. Of unlike types they are plain numbers, and so is all of an expert; then layouts
    differ by rounding."""

    def kind(name: str) -> str:
        return "F32" if "gate_inp" in name else up if "up_exps" in name else "MXFP4" if "_exps" in name else "Q8_0"

    truth = save_model("gpt_oss_moe", tmp_path / "plain", **SIZES, **WRITTEN, vocab_size=128)
    path = write_gguf(truth, tmp_path / "model.gguf", kind)
    held, planned = held_bytes(path, read_config(path))
    assert held == planned
    found = scored(path, "pp=1", CONFIG)
    for layout in in_turn(layouts("gpt_oss_moe"), up, UPS, part):
        if up == "MXFP4":
            assert scored(path, layout, CONFIG) == found, layout
        else:
            near = torch.tensor(scored(path, layout, CONFIG)[1][:39]) - torch.tensor(found[1][:39])
            assert near.abs().median() < 0.03, layout
    exact = msgspec.structs.replace(CONFIG, dequantize=True, dtype="float64")
    off = torch.tensor(found[1][:39]) - torch.tensor(scored(path, "pp=1", exact)[1][:39])
    assert off.abs().median() < 0.03


def test_experts_of_gpt_oss_as_they_are_published(tmp_path: Path) -> None:
    """They take the bytes of the files, and answers are near to those of what they stand for.

    The layers beside them are plain numbers, whose products are torch's: to the bit only stages answer alike.
    """
    save_model("gpt_oss_moe", tmp_path / "plain", **SIZES)
    folder = tmp_path / "mxfp4"
    save_mxfp4(tmp_path / "plain", folder)
    held, planned = held_bytes(folder, read_config(folder))
    assert held == planned
    found = scored(folder, "pp=1", CONFIG)
    exact = msgspec.structs.replace(CONFIG, dequantize=True, dtype="float64")
    off = torch.tensor(found[1][:39]) - torch.tensor(scored(folder, "pp=1", exact)[1][:39])
    assert off.abs().median() < 0.03
    assert scored(folder, "pp=3,layers=1+2+1", CONFIG) == found
    for layout in ("tp=2", "tp=2,experts=spread"):
        near = torch.tensor(scored(folder, layout, CONFIG)[1][:39]) - torch.tensor(found[1][:39])
        assert near.abs().median() < 0.03, layout
