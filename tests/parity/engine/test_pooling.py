"""What prompts come to: the same as with `transformers` and sentence-transformers' arithmetic, under every plan."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.parity.engine.test_few_bits import SIZES
from tests.parity.engine.test_generation import CHUNKED, LAYOUTS, ROOMY, TIGHT, prompts
from tests.support.models.families import SHAPE, save_model
from tests.support.selection import EACH_PART, covering, in_turn
from tllm.core.errors import RequestError, WeightsError, counted
from tllm.engine.compute.pooler import precise_sum
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.parallel.quantized_weight import weight_bytes
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.server.pooling.vectors import embedding
from tllm.spec.request import PoolingKind, PoolingParams, Request, SamplingParams

NOTHING = SamplingParams(max_tokens=1, temperature=0)
TOKENS = (4, 9, 77)
CASES = ("llama", "gemma2", "qwen3", "qwen3_moe", "gpt_oss_moe", "deepseek_v3_moe", "qwen3_next_moe")
KINDS: tuple[PoolingKind, ...] = ("last", "mean", "logprobs")


def pooled(engine: Engine, kind: PoolingKind, asked: list[list[int]]) -> list[list[float]]:
    params = PoolingParams(kind=kind, token_ids=TOKENS if kind == "logprobs" else ())
    requests = [
        Request(id=f"{kind}-{i}", prompt_ids=tuple(ids), params=NOTHING, pooling=params) for i, ids in enumerate(asked)
    ]
    streams = [engine.submit(request) for request in requests]
    return [[number for output in stream for number in output.pooled] for stream in streams]


def truth(model: transformers.PreTrainedModel, kind: PoolingKind, ids: list[int]) -> Tensor:
    """By `transformers`: hidden states after the final norm, and log-probabilities of what follows."""
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    hidden_TD, logits_TV = out.hidden_states[-1][0].double(), out.logits[0].double()
    of_kind: dict[str, Callable[[], Tensor]] = {
        "last": lambda: hidden_TD[-1],
        "mean": lambda: hidden_TD.mean(0),
        "logprobs": lambda: torch.log_softmax(logits_TV[-1], -1)[list(TOKENS)],
    }
    return of_kind[kind]()


WAYS = [
    (layout, config)
    for layout in LAYOUTS
    for config in ((ROOMY, CHUNKED, TIGHT) if layout in ("pp=1", "pp=2,tp=1+2") else (CHUNKED,))
]


@EACH_PART
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(180)
def test_every_plan_comes_to_what_transformers_does(case: str, part: str, tmp_path: Path) -> None:
    """Whole, in chunks, and with so few pages that prompts wait for each other."""
    model = save_model(case, tmp_path)
    wanted = {kind: [truth(model, kind, ids) for ids in prompts()] for kind in KINDS}
    for layout, config in in_turn(WAYS, case, CASES, part, count=2):
        with Engine.load(tmp_path, layout, config) as engine:
            for kind in KINDS:
                for got, want in zip(pooled(engine, kind, prompts()), wanted[kind], strict=True):
                    off = (torch.tensor(got, dtype=torch.float64) - want).abs()
                    assert (off <= 3e-5 + 1e-5 * want.abs()).all(), (layout, config, kind, off.max())


def test_in_float64_it_is_transformers_to_ten_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose norms and softmax go through float32 even in a float64 model: here they do not."""

    def norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    model = save_model("llama", tmp_path).double()
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    model.set_attn_implementation("sdpa")
    for config in (ROOMY, CHUNKED):
        with Engine.load(tmp_path, "pp=2,tp=1+2", msgspec.structs.replace(config, dtype="float64")) as engine:
            for kind in KINDS:
                for ids, got in zip(prompts(), pooled(engine, kind, prompts()), strict=True):
                    want = truth(model, kind, ids)
                    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-10, atol=1e-10)


def test_with_few_bits_every_plan_and_every_chunk_come_to_the_same_bits(tmp_path: Path) -> None:
    """As replies do: products of few bits do not depend on rows beside them, nor on the cut."""
    save_model("llama", tmp_path, **SIZES)
    quantized = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=4, quantize="int8")
    wanted: dict[PoolingKind, list[list[float]]] = {}
    for layout in ("pp=1", "pp=2,tp=2", "tp=3,shares=1:2:1"):
        for tokens in (1024, 11):
            with Engine.load(
                tmp_path, layout, msgspec.structs.replace(quantized, max_num_batched_tokens=tokens)
            ) as engine:
                for kind in KINDS:
                    got = pooled(engine, kind, prompts())
                    assert wanted.setdefault(kind, got) == got, (layout, tokens, kind)


def test_a_mean_takes_no_page_and_the_last_token_may(tmp_path: Path) -> None:
    """Pages have no hidden states: a mean over tokens that were found would lack theirs."""
    model = save_model("llama", tmp_path)
    ids = prompts()[-1]
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine:
        first = pooled(engine, "last", [ids])[0]
        found = []
        for kind in ("last", "mean"):
            request = Request(
                id=f"again-{kind}", prompt_ids=tuple(ids), params=NOTHING, pooling=PoolingParams(kind=kind)
            )
            [output] = engine.submit(request)
            found.append(output.cached_tokens)
            want = truth(model, kind, ids)  # type: ignore[arg-type]
            torch.testing.assert_close(torch.tensor(output.pooled, dtype=torch.float64), want, rtol=1e-5, atol=3e-5)
        assert found == [32, 0]
        torch.testing.assert_close(first, pooled(engine, "last", [ids])[0], rtol=1e-5, atol=3e-5)


def test_a_mean_is_rounded_once(tmp_path: Path) -> None:
    """Exact sums of awkward numbers, as fractions have them; an ordinary float64 sum is wrong by far."""
    dice = torch.Generator().manual_seed(3)
    x_TD = torch.randn(301, 7, generator=dice, dtype=torch.float64) * 10.0 ** torch.randint(
        -9, 9, (301, 7), generator=dice
    )
    x_TD = torch.cat((x_TD, -x_TD[:200], x_TD[:1] * 1e-7))
    exact = [sum((Fraction(value) for value in column), Fraction()) for column in x_TD.T.tolist()]
    for cut in (1, 13, 255, len(x_TD)):
        parts = [precise_sum(x_TD[at : at + cut]) for at in range(0, len(x_TD), cut)]
        found = [sum(map(Fraction, column), Fraction()) for column in torch.cat(parts).T.tolist()]
        assert [float(value) for value in found] == [float(value) for value in exact]
    assert x_TD.sum(0).tolist() != [float(value) for value in exact]


def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Its arithmetic: mask · hidden / Σ mask for a mean, then x / ‖x‖; Matryoshka cuts, and normalises again."""
    model = save_model("qwen3", tmp_path)
    with Engine.load(tmp_path, "pp=2", ROOMY) as engine:
        got = pooled(engine, "mean", prompts())
    for ids, values in zip(prompts(), got, strict=True):
        with torch.inference_mode():
            hidden_TD = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        mask_T1 = torch.ones(len(ids), 1)
        mean_D = (hidden_TD * mask_T1).sum(0) / mask_T1.sum().clamp(min=1e-9)
        for dimensions in (None, 16):
            want = torch.nn.functional.normalize(mean_D[:dimensions], p=2, dim=0)
            mine = torch.tensor(embedding(values, normalize=True, dimensions=dimensions))
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("prefix", "labels"), covering(["Llama", "Qwen3", "Gemma2"], [1, 3]))
def test_classification_heads_score_as_transformers_does(prefix: str, labels: int, tmp_path: Path) -> None:
    config = getattr(transformers, f"{prefix}Config")(**SHAPE, num_labels=labels)
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        wanted = [model(torch.tensor([ids])).logits[0].tolist() for ids in prompts()]
    for layout in ("pp=1", "tp=3,shares=1:2:1", "pp=2,tp=1+2"):
        with Engine.load(tmp_path, layout, CHUNKED) as engine:
            torch.testing.assert_close(pooled(engine, "score", prompts()), wanted, rtol=1e-5, atol=3e-5)
            with pytest.raises(RequestError, match=f"a head of {counted(labels, 'label')} and none for tokens"):
                engine.generate([[1, 2]], NOTHING)
            torch.testing.assert_close(
                torch.tensor(pooled(engine, "last", prompts()[:1])[0]).shape, torch.Size([SHAPE["hidden_size"]])
            )
            held = [sum(map(weight_bytes, stage.model.parameters())) for stage in engine.stages]  # type: ignore[attr-defined]
            assert held == [rank.weights for rank in rank_bytes(engine.spec, engine.plan, "float32")]
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine, pytest.raises(RequestError, match="none for tokens"):
        pooled(engine, "logprobs", prompts()[:1])


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_saved_without_its_head_is_read(tied: bool, tmp_path: Path) -> None:
    """As embedding models are: names without `model.`, and the embedding is the head where they are tied."""
    model = save_model("qwen3", tmp_path / "whole", tie_word_embeddings=tied)
    wanted = [truth(model, "last", ids) for ids in prompts()]
    model.model.save_pretrained(tmp_path / "headless")
    with Engine.load(tmp_path / "headless", "pp=2", ROOMY) as engine:
        for got, want in zip(pooled(engine, "last", prompts()), wanted, strict=True):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-5, atol=3e-5)
        if tied:
            assert len(engine.generate([[1, 2]], NOTHING)[0]) == 1
        else:
            with pytest.raises(RequestError, match=r"saved without its head for tokens \(lm_head\.weight\)"):
                engine.generate([[1, 2]], NOTHING)
            with pytest.raises(RequestError, match="saved without its head"):
                pooled(engine, "logprobs", prompts()[:1])
    if not tied:
        config = tmp_path / "headless" / "config.json"
        config.write_text(config.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
        with pytest.raises(WeightsError, match=r"no tensor 'lm_head\.weight'.*\n.*saved without its head"):
            Engine.load(tmp_path / "headless", "pp=1", ROOMY)
    with Engine.load(tmp_path / "whole", "pp=1", ROOMY) as engine, pytest.raises(RequestError, match=r"score\.weight"):
        pooled(engine, "score", prompts()[:1])
