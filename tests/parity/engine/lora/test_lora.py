"""LoRA adapters in the engine against PEFT, under every kind of plan and beside each other in one batch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.adapters import peft_adapter, peft_dora, save_adapter
from tests.support.models.families import save_model
from tests.support.models.gguf_models import write_gguf
from tests.support.selection import EACH_PART, in_turn, soak_but
from tests.unit.engine.kits import FreeRows
from tllm.core.errors import RequestError
from tllm.engine.engine import Engine
from tllm.engine.schedule.batch import ForgetAdapter
from tllm.engine.schedule.limits import EngineConfig
from tllm.model.transformer import build
from tllm.parallel.linear import ColumnLinear, RowLinear
from tllm.parallel.lora.adapted_model import module_shapes
from tllm.parallel.mesh import whole
from tllm.quantization.blocks import dequantize
from tllm.quantization.round_weights import round_weights
from tllm.spec.request import Request, SamplingParams
from tllm.weights.lora.held_adapter import HeldAdapter, HeldFiles

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, Sequence[str]] = {
    "llama": (*ATTENTION, *MLP),
    "llama_mha_tied_bias": ("q_proj", "v_proj", "down_proj"),  # some parts of what is merged
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3": (*ATTENTION, *MLP),
    "qwen2_moe": (*ATTENTION, "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    "deepseek_v3_moe": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen3_next_moe": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "o_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj", *MLP),
}
LAYOUTS = ("tp=2", "pp=2", "tp=3,shares=1:2:1", "pp=2,tp=1+2")
PROMPT = tuple(torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(1)).tolist())
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)


@contextmanager
def engine_with(
    folder: Path, adapters: Sequence[Path], plan: str = "pp=1", **config: object
) -> Iterator[tuple[Engine, list[str]]]:
    """An engine that has loaded adapters, and their ids."""
    sizes = EngineConfig(**{"cache_tokens": 1024, "max_model_len": 128, "dtype": "float32", **config})  # type: ignore[arg-type]
    with Engine.load(folder, plan, sizes) as engine:
        shapes = module_shapes(build(engine.spec, whole(engine.spec), torch.float32, "meta"))
        ids = []
        for adapter in adapters:
            held = HeldAdapter.read(adapter.name, adapter, shapes, 16)
            for stage in engine.stages:
                files, tp = HeldFiles(held.contents), stage.model.seam.tp
                updates = held.adapter.load(stage.model, files, stage.cache.dtype, tp)  # type: ignore[arg-type]
                stage.adapters.add(held.lora, updates)
            ids.append(held.lora)
        yield engine, ids


def scores(engine: Engine, lora: str, prompt: Sequence[int] = PROMPT) -> Tensor:
    """The log-probability of each token of a prompt but the first, in float64."""
    request = Request(id=f"scored-{lora}", prompt_ids=tuple(prompt), params=SCORED, lora=lora)
    found = [score for output in engine.submit(request) for score in output.prompt_logprobs]
    return torch.tensor([score.logprob for score in found if score is not None], dtype=torch.float64)


def together(engine: Engine, loras: Sequence[str], params: SamplingParams = GREEDY) -> list[list[tuple[int, float]]]:
    """(token, log-probability) of a reply with each adapter, all computed in the same batches."""
    requests = [
        Request(id=f"r{place}", prompt_ids=PROMPT[place : place + 12], params=params, lora=lora)
        for place, lora in enumerate(loras)
    ]
    streams = [engine.submit(request) for request in requests]
    replies = []
    for stream in streams:
        found = [score for output in stream for score in output.logprobs]
        replies.append([(score.token_id, score.logprob) for score in found])
    return replies


def alone(engine: Engine, loras: Sequence[str]) -> list[list[tuple[int, float]]]:
    """The same with one request after another."""
    replies = []
    for place, lora in enumerate(loras):
        request = Request(id=f"a{place}", prompt_ids=PROMPT[place : place + 12], params=GREEDY, lora=lora)
        found = [score for output in engine.submit(request) for score in output.logprobs]
        replies.append([(score.token_id, score.logprob) for score in found])
    return replies


def peft_scores(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].double()
    return logits.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]


@EACH_PART
@pytest.mark.parametrize("case", TARGETS)
def test_log_probabilities_are_those_of_peft(case: str, part: str, tmp_path: Path) -> None:
    """PEFT computes in float32. What it merges in float64 is a plain model, which ours equals to float64's rounding."""
    truth = save_model(case, tmp_path / "base")
    bare = peft_scores(truth)
    last = TARGETS[case][-1]
    config = dict(rank_pattern={last: 6}, alpha_pattern={TARGETS[case][0]: 3}, use_rslora=True)
    peft = peft_adapter(truth, tmp_path / "adapter", TARGETS[case], **config)
    want = peft_scores(peft)
    assert (want - bare).abs().max() > 0.1, "an adapter that does nothing would hide a fault"
    peft.double().merge_and_unload().save_pretrained(tmp_path / "merged")
    with engine_with(tmp_path / "merged", [], dtype="float64") as (engine, _):
        exact = scores(engine, "")
    for layout in in_turn(("pp=1", "pp=2,tp=1+2"), case, TARGETS, part, count=1):
        with engine_with(tmp_path / "base", [tmp_path / "adapter"], layout) as (engine, (lora,)):
            torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=2e-5)
            torch.testing.assert_close(scores(engine, ""), bare, rtol=0, atol=2e-5)
    for layout in in_turn(LAYOUTS, case, TARGETS, part, count=1):
        with engine_with(tmp_path / "base", [tmp_path / "adapter"], layout, dtype="float64") as (engine, (lora,)):
            torch.testing.assert_close(scores(engine, lora), exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "layout"),
    soak_but(
        [("phi3", "tp=3,shares=1:2:1"), ("deepseek_v3_moe", "pp=2,tp=1+2")],
        [(case, layout) for case in TARGETS for layout in ("pp=1", *LAYOUTS)],
    ),
)
def test_dora_beside_the_model_is_what_peft_merges(case: str, layout: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    peft = peft_dora(truth, tmp_path / "adapter", TARGETS[case], rank_pattern={TARGETS[case][-1]: 6}, use_rslora=True)
    peft.double().merge_and_unload().save_pretrained(tmp_path / "merged")
    with engine_with(tmp_path / "merged", [], dtype="float64") as (engine, _):
        want = scores(engine, "")
    with engine_with(tmp_path / "base", [tmp_path / "adapter"], layout, dtype="float64") as (engine, (lora,)):
        bare = scores(engine, "")
        for _ in range(2):  # f is made in the first batch
            torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=1e-10)
        assert (want - bare).abs().max() > 0.1
        for stage in engine.stages:
            for update in stage.adapters._loaded[lora].values():
                update.factor = None
        assert (scores(engine, lora) - want).abs().max() > 1e-3, "magnitudes that do nothing would hide a fault"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model, and three adapters of it of other ranks and modules, the last one with DoRA."""
    folder = tmp_path_factory.mktemp("lora")
    save_model("llama", folder / "base", hidden_size=64, intermediate_size=96)
    ends = ((), ("q_proj", "down_proj"), ("v_proj", "o_proj", "up_proj"))
    made = [
        save_adapter(folder / "base", folder / f"adapter-{seed}", seed, rank=2 + seed, ends=some, use_dora=seed == 2)
        for seed, some in enumerate(ends)
    ]
    return folder / "base", made


@pytest.mark.parametrize("quantize", soak_but([None, "int4"], [None, "int4", "int8"]))
@pytest.mark.parametrize("plan", soak_but(["pp=2,tp=1+2"], ["pp=1", "pp=2,tp=1+2"]))
def test_adapters_in_one_batch_are_as_each_alone(
    quantize: str | None, plan: str, folders: tuple[Path, list[Path]]
) -> None:
    """Two rows without an adapter and rows of three, in prompts and replies; with weights in few bits to the bit."""
    with engine_with(*folders, plan, quantize=quantize, enable_prefix_caching=False) as (engine, ids):
        loras = ["", *ids, ids[0], ""]
        mixed, single = together(engine, loras), alone(engine, loras)
        assert engine.stages[0].batches > 0
    assert [[token for token, _ in reply] for reply in mixed] == [[token for token, _ in reply] for reply in single]
    if quantize is not None:
        assert mixed == single
    for one, other in zip(mixed, single, strict=True):
        torch.testing.assert_close([score for _, score in one], [score for _, score in other], rtol=0, atol=2e-5)
    assert len({tuple(token for token, _ in reply) for reply in mixed}) >= 5, "adapters that do nothing hide a fault"


@pytest.mark.parametrize(("plan", "place"), [("pp=1", 2), ("tp=2", 0), ("pp=2,tp=1+2", 2)])
def test_few_bits_with_an_adapter_are_the_rounded_model_with_it(
    plan: str, place: int, folders: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    """Against plain weights that were rounded to int4 and back, of which products round their activations no more."""
    base, adapters = folders
    with engine_with(base, [adapters[place]], plan, quantize="int4") as (engine, (lora,)):
        packed = scores(engine, lora)
        bare = scores(engine, "")
    save_rounded(base, tmp_path)
    with engine_with(tmp_path, [adapters[place]]) as (engine, (lora,)):
        plain = scores(engine, lora)
    # Activations rounded to 8 bits: far from nothing, and far less than what the adapter does.
    assert (packed - plain).abs().mean() < 0.1 * (packed - bare).abs().mean()


def save_rounded(base: Path, folder: Path) -> None:
    """The model in a folder with each linear of its layers rounded to int4, in groups of 32, and back."""
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        if name.startswith("model.layers.") and weight.ndim == 2:
            tensors[name] = dequantize(round_weights(weight.float(), "int4")).to(weight.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(base / "config.json", folder)


def test_a_prefix_of_another_adapter_is_never_found(folders: tuple[Path, list[Path]]) -> None:
    """The same prompt without an adapter, with each, and again: only what was computed alike is found."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def cached(engine: Engine, lora: str, number: int) -> tuple[int, list[int]]:
        request = Request(id=f"p{number}", prompt_ids=PROMPT, params=params, lora=lora)
        outputs = list(engine.submit(request))
        return outputs[0].cached_tokens, [token for output in outputs for token in output.token_ids]

    with engine_with(*folders) as (engine, ids):
        first = [cached(engine, lora, number) for number, lora in enumerate(["", *ids])]
        again = [cached(engine, lora, 10 + number) for number, lora in enumerate(["", *ids])]
    assert [found for found, _ in first] == [0, 0, 0, 0]
    assert [found for found, _ in again] == [32, 32, 32, 32]
    assert [tokens for _, tokens in first] == [tokens for _, tokens in again]


def test_drafts_change_nothing_with_an_adapter(folders: tuple[Path, list[Path]]) -> None:
    with engine_with(*folders) as (engine, ids):
        plain = alone(engine, ids)
    with engine_with(*folders, num_speculative_tokens=4) as (engine, ids):
        speculation = engine.driver.scheduler.speculation
        assert speculation is not None
        speculation.cost = FreeRows()  # on a busy machine a step may seem too dear for drafts
        drafted = together(engine, ids)
        assert engine.stats()["draft_tokens"] > 0
    assert [[token for token, _ in one] for one in plain] == [[token for token, _ in one] for one in drafted]


def test_every_rank_lets_go_of_an_adapter_and_keeps_one_that_was_loaded_anew(folders: tuple[Path, list[Path]]) -> None:
    with engine_with(*folders, "pp=2,tp=1+2") as (engine, ids):
        streams = [
            engine.submit(Request(id=lora, prompt_ids=PROMPT, params=GREEDY, lora=lora)) for lora in (ids[0], ids[2])
        ]
        next(streams[0]), next(streams[1])
        for lora, number in ((ids[0], 0), (ids[0], 0), (ids[1], 7)):
            engine._inbox.put(ForgetAdapter(lora, number))
        reasons = [list(stream)[-1].finish_reason for stream in streams]
        assert reasons == ["cancelled", "length"]
        alone(engine, ids[1:])
        held = [set(stage.adapters._loaded) for stage in engine.stages]
    assert held == [set(ids[1:])] * 3


def test_an_adapter_that_is_not_loaded_is_an_error_of_its_request(folders: tuple[Path, list[Path]]) -> None:
    with engine_with(*folders) as (engine, ids):
        engine.stages[0].adapters.remove(ForgetAdapter(ids[0], 0))
        with pytest.raises(RequestError, match="is not loaded"):
            alone(engine, ids[:1])
        with pytest.raises(RequestError, match="stands for an adapter"):
            list(engine.submit(Request(id="x", prompt_ids=PROMPT, params=GREEDY, cache_salt=f"lora {ids[1]} ")))
        assert alone(engine, ids[1:2])[0]


@pytest.mark.parametrize("fault", ["scale", "rows", "columns"])
def test_faults_are_seen(fault: str, folders: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale left out, the wrong rows of B, and what a rank adds to a sum counted twice: each far beyond rounding."""
    with engine_with(*folders, "tp=2", dtype="float64") as (engine, ids):
        right = scores(engine, ids[0])
        for stage in engine.stages:
            for linear, update in stage.adapters._loaded[ids[0]].items():
                if fault == "scale":
                    update.spans = [span._replace(scale=1.0) for span in update.spans]
                elif fault == "rows" and isinstance(linear, ColumnLinear):
                    update.B[0].data = update.B[0].data.roll(1, 0)
                elif fault == "columns" and isinstance(linear, RowLinear):
                    update.A.data = 2 * update.A.data
        wrong = scores(engine, ids[0], PROMPT)
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.parametrize("plan", ["pp=1", "pp=2,tp=1+2"])
def test_a_gguf_file_takes_the_adapters_of_its_model(plan: str, tmp_path: Path) -> None:
    """Of the "llama" architecture, whose files have the rows of queries and keys in another order than PEFT knows."""
    truth = save_model("llama", tmp_path / "plain", hidden_size=64, intermediate_size=96)
    path = write_gguf(truth, tmp_path / "model.gguf", lambda name: "F32" if "token_embd" in name else "Q4_0")
    bare = peft_scores(truth)  # with the numbers of the file
    want = peft_scores(peft_adapter(truth, tmp_path / "adapter", TARGETS["llama"]))
    with engine_with(path, [tmp_path / "adapter"], plan, dequantize=True) as (engine, (lora,)):
        torch.testing.assert_close(scores(engine, ""), bare, rtol=0, atol=2e-5)
        torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=2e-5)
    with engine_with(path, [tmp_path / "adapter"], plan) as (engine, (lora,)):
        # Products with packed weights round their activations to 8 bits.
        assert (scores(engine, lora) - want).abs().mean() < 0.1 * (want - bare).abs().mean()
