"""Completions of one prompt that have its tokens once learn what rows that are whole learn, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.post_training.policy_task import grpo
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.attention import packed_attention
from tllm.training.attention.packed_attention import _blocks
from tllm.training.data.batch_tensors import Tokens, tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import RowPiece, put_together
from tllm.training.data.preference_rows import MISMATCHED, OTHER, PairEncoder, ReplyEncoder, UnpairedEncoder
from tllm.training.evaluation.divergence_estimate import DivergenceEstimate
from tllm.training.evaluation.forward_rows import filled_up
from tllm.training.job.job import Job
from tllm.training.job.job_parts import shares_prompts
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.preference_tables import DPOConfig, KTOConfig, ORPOConfig, SimPOConfig
from tllm.training.objectives.kto_loss import KTOLoss
from tllm.training.objectives.policy_gradient import OLD, REFERENCE, SAMPLED
from tllm.training.objectives.reply_log_probs import REFERENCE as REFERENCE_LOG_PROBS
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import Completion, Turns
from tllm.training.report.step_report import StepReport
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.step.shared_prompts import share_prompts, with_shared_prompts
from tllm.weights.byte_source import LocalFiles

FAMILIES = ("llama_dynamic", "gpt_oss_moe", "gemma4_e2b", "gemma3", "glm4_moe_lite", "gemma4_moe")


def completed(dice: torch.Generator) -> list[tuple[list[int], list[int], bool]]:
    """Prompts, completions and whether each is learned: two groups of the first prompt with another between them, a
    prompt alone, one of a token, and one whose completions are all cut off."""
    prompts = [torch.randint(101, (count,), generator=dice).tolist() for count in (19, 7, 1, 5)]
    prompts.append([*prompts[0][:-1], (prompts[0][-1] + 1) % 101])  # as long as the first, and another
    order = [(0, 9), (0, 9), (0, 3), (4, 4), (0, 5), (0, 5), (1, 6), (2, 4), (2, 4), (3, 2), (3, 8)]
    rows = [(prompts[which], torch.randint(101, (count,), generator=dice).tolist()) for which, count in order]
    return [(*row, which != 3 and place != 1) for place, (row, (which, _)) in enumerate(zip(rows, order, strict=True))]


def microbatch() -> Tokens:
    """With tokens of tools in the first completion, and numbers of a reference and of a pass before."""
    dice = torch.Generator().manual_seed(4)
    rows = []
    for place, (prompt, ids, is_learned) in enumerate(completed(dice)):
        turns = Turns((1, 1, 0, 0, 1, 1, 1, 1, 0), (), 1, 0) if place == 0 else None
        logs = (-4 - torch.rand(len(ids), generator=dice)).tolist()
        rows.append(
            completion_row(prompt, Completion(tuple(ids), tuple(logs), False, turns), is_learned, 1 - place / 4)
        )
    tokens = tokens_of(rows)
    more = {name: torch.randn(len(tokens.ids_T), generator=dice).double() / 2 - 4.6 for name in (OLD, REFERENCE)}
    return replace(tokens, of_tokens={**tokens.of_tokens, **more})


def learned(model: RankModel, tokens: Tokens) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The loss with the metrics, and the gradients."""
    result = model.forward_backward([tokens], 1, 0.1)
    gradients = {}
    for name, parameter in model.chunks[0].named_parameters():
        assert parameter.grad is not None, name
        gradients[name], parameter.grad = parameter.grad, None
    means = {name: one.total / one.count for name, one in result.metrics.items()}
    return {"loss": result.loss_sum, "tokens": result.tokens, **means}, gradients


def job_of(folder: Path, **more: object) -> Job:
    table = grpo(folder, beta=0.1, importance_sampling_level="sequence", epsilon=0.9, loss_type="grpo")
    fields = dict(output_dir=str(folder / "run"), train_files=("none",), max_steps=1, model_name_or_path=str(folder))
    return Job(**{**fields, "task": "grpo", "grpo": table, "seq_len": 64, "dtype": "float64", **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", soak_but(FAMILIES[:2], FAMILIES))
def test_gradients_are_those_of_whole_rows(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    raw = read_config(tmp_path)
    spec = spec_from_config(raw)
    model = RankModel(RankConfig(job_of(tmp_path), Plan.parse("pp=1", spec.num_layers), spec, 0, Groups()))
    InitialWeights(LocalFiles(tmp_path), config=raw).filler(spec, 0, "float64")(model.chunks[0])
    tokens = microbatch()
    shared = share_prompts(tokens)
    want, whole = learned(model, tokens)
    told, gradients = learned(model, shared)
    assert told == pytest.approx(want, rel=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-10 * float(whole[name].abs().max()))


def counted_flops(model: RankModel, tokens: Tokens) -> int:
    """Forward and backward, by the weights that each token is multiplied by and the keys that it sees."""
    chunk, spec = model.chunks[0], model._config.spec
    of_layers = sum(x.numel() for name, x in chunk.named_parameters() if x.ndim == 2 and "layers." in name)
    keys = int((tokens.positions_T + 1).sum()) * spec.num_layers
    attention = 2 * 2 * spec.head_dim * spec.num_heads * keys
    logits = 2 * tokens.predicted * spec.hidden_size * spec.vocab_size
    return 3 * (2 * len(tokens.ids_T) * of_layers + attention + logits)


@pytest.mark.parametrize("is_paired", [False, True])
def test_flops_are_those_of_what_is_computed(is_paired: bool, tmp_path: Path) -> None:
    """Of GRPO's completions, whose prompts are shared before, and of pairs, which the model shares itself."""
    save_model("llama", tmp_path)
    raw = read_config(tmp_path)
    spec = spec_from_config(raw)
    job = job_of(tmp_path, task="simpo", grpo=None, **PAIRED["simpo"]) if is_paired else job_of(tmp_path)
    config = RankConfig(job, Plan.parse("pp=1", spec.num_layers), spec, 0, Groups())
    whole = pairs(torch.Generator().manual_seed(6)) if is_paired else microbatch()
    shared = share_prompts(whole)
    model = RankModel(config)
    for each, given, computed in (
        (config, whole, whole),
        (with_shared_prompts(config), whole if is_paired else shared, shared),
    ):
        assert StepReport(each, 1e9)._flops([given, given]) == 2 * counted_flops(model, computed)
    assert counted_flops(model, shared) < 0.9 * counted_flops(model, whole)


def test_a_prompt_is_there_once_and_each_label_with_its_token() -> None:
    tokens = microbatch()
    shared = share_prompts(tokens)
    assert shared.lengths == [18, 8, 1, 3, 23 - 1, 18, 5, 5, 12, 4, 4, 4, 1, 1]
    assert shared.prefixes == (None, 0, 0, 0, None, None, 5, 5, None, None, None, None, 11, 11)
    assert shared.predicted == tokens.predicted and len(shared.ids_T) == sum(shared.lengths)
    for name in (SAMPLED, OLD, REFERENCE):
        pairs = ((some.of_tokens[name], some.labels_T != IGNORED) for some in (shared, tokens))
        (few_T, is_few_T), (all_T, is_learned_T) = pairs
        assert torch.equal(few_T[is_few_T], all_T[is_learned_T])


def test_what_would_change_more_than_rounding_shares_no_prompt(tmp_path: Path) -> None:
    spec_of = {}
    for family in ("llama", "qwen3_next_moe"):
        save_model(family, tmp_path / family)
        spec_of[family] = spec_from_config(read_config(tmp_path / family))
    job = job_of(tmp_path)
    assert shares_prompts(job, spec_of["llama"]) and not shares_prompts(job, spec_of["llama"], cp=2)
    assert not shares_prompts(job, spec_of["llama"], "cuda")
    assert not shares_prompts(job, spec_of["qwen3_next_moe"]), "a gated delta net has states"
    for more in (
        {"deterministic": True},
        {"router_aux_loss_coef": 0.1},
        {"task": "sft", "grpo": None},
    ):
        assert not shares_prompts(job_of(tmp_path, **more), spec_of["llama"]), more
    assert shares_prompts(job_of(tmp_path, lora=LoraJob()), spec_of["llama"])


class Numbers:
    """A tokenizer of texts that are ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(one) for one in text.split()]


def pairs(dice: torch.Generator) -> Tokens:
    """Pairs as their encoder gives them, end to end in two rows: two of one prompt, replies of unlike lengths, one that
    begins as the other does, a prompt of one token, one whose tail is weighed, and a row of filling."""
    prompts = [torch.randint(101, (count,), generator=dice).tolist() for count in (17, 17, 6, 1, 9)]
    prompts[1] = prompts[0]
    encoder, rows = PairEncoder(ReplyEncoder(cast(Any, Numbers()), None, ()), "numbers"), []
    for place, prompt in enumerate(prompts):
        chosen, rejected = (torch.randint(101, (count,), generator=dice).tolist() for count in (5 + place, 4))
        if place == 2:
            rejected[:3] = chosen[:3]
        texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        document = encoder.encode({name: " ".join(map(str, ids)) for name, ids in texts.items()})
        reference = -4 - torch.rand(2, generator=dice).double().numpy()
        rows.append(document._replace(values={**document.values, REFERENCE_LOG_PROBS: reference}))
    pieces = [RowPiece(number, 0, len(row.ids)) for number, row in enumerate(rows)]
    packed = [put_together(0, tuple(pieces[:2]), rows.__getitem__)]
    packed += [put_together(place - 1, (pieces[place],), rows.__getitem__) for place in (2, 3, 4)]
    return tokens_of(filled_up(packed, 5))


PAIRED: dict[str, dict[str, object]] = {
    "dpo": {"dpo": DPOConfig(beta=0.3, ld_alpha=0.5)},
    "orpo": {"orpo": ORPOConfig(beta=0.4)},
    "simpo": {"simpo": SimPOConfig(cpo_alpha=0.2)},
}
PAIRED_FAMILIES = ("gpt_oss_moe", "gemma3", "llama", "glm4_moe_lite", "gemma4_moe")


@pytest.mark.parametrize(
    ("task", "family"),
    soak_but(zip(PAIRED, PAIRED_FAMILIES, strict=False), itertools.product(PAIRED, PAIRED_FAMILIES)),
)
def test_pairs_learn_what_whole_rows_learn(
    task: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a reply takes several blocks of queries."""
    monkeypatch.setattr(packed_attention, "ROWS_AT_ONCE", 3)
    save_model(family, tmp_path)
    raw = read_config(tmp_path)
    spec = spec_from_config(raw)
    job = job_of(tmp_path, task=task, grpo=None, **PAIRED[task])
    config = RankConfig(job, Plan.parse("pp=1", spec.num_layers), spec, 0, Groups())
    assert with_shared_prompts(config).shares_prompts
    tokens = pairs(torch.Generator().manual_seed(6))
    found = []
    for each in (config, with_shared_prompts(config)):
        model = RankModel(each)
        InitialWeights(LocalFiles(tmp_path), config=raw).filler(spec, 0, "float64")(model.chunks[0])
        found.append(learned(model, tokens))
    (want, whole), (told, gradients) = found
    assert told == pytest.approx(want, rel=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-10 * float(whole[name].abs().max()))


def unpaired(dice: torch.Generator) -> Tokens:
    """Rows of KTO as their encoder gives them, each a reply and a mismatched one: three of one prompt, two of another,
    one alone, and a row of filling."""
    prompts = [torch.randint(101, (count,), generator=dice).tolist() for count in (17, 6, 9)]
    encoder, rows = UnpairedEncoder(ReplyEncoder(cast(Any, Numbers()), None, ()), "numbers"), []
    for place, which in enumerate((0, 0, 0, 1, 1, 2)):
        own, other = (torch.randint(101, (count,), generator=dice).tolist() for count in (3 + place, 4))
        texts = {"prompt": prompts[which], "completion": own, OTHER: other}
        row = {name: " ".join(map(str, ids)) for name, ids in texts.items()}
        document = encoder.encode({**row, "label": place % 2 == 0})
        reference = (torch.tensor([-15.0, -30.0]) - torch.rand(2, generator=dice)).double().numpy()  # kl is above 0
        rows.append(document._replace(values={**document.values, REFERENCE_LOG_PROBS: reference}))
    pieces = [RowPiece(number, 0, len(row.ids)) for number, row in enumerate(rows)]
    packed = [put_together(place, (piece,), rows.__getitem__) for place, piece in enumerate(pieces)]
    return tokens_of(filled_up(packed, 7))


@pytest.mark.parametrize("family", soak_but(("llama", "gpt_oss_moe"), PAIRED_FAMILIES))
def test_replies_of_one_prompt_that_no_pair_holds_learn_what_whole_rows_learn(family: str, tmp_path: Path) -> None:
    """Own replies with gradients, and before them mismatched ones, whose log-probabilities are asked apart."""
    save_model(family, tmp_path)
    raw = read_config(tmp_path)
    spec = spec_from_config(raw)
    job = job_of(tmp_path, task="kto", grpo=None, kto=KTOConfig(beta=0.3))
    config = RankConfig(job, Plan.parse("pp=1", spec.num_layers), spec, 0, Groups())
    tokens, found = unpaired(torch.Generator().manual_seed(8)), []
    for each in (config, with_shared_prompts(config)):
        model = RankModel(each)
        InitialWeights(LocalFiles(tmp_path), config=raw).filler(spec, 0, "float64")(model.chunks[0])
        objective = model.objective
        assert isinstance(objective, KTOLoss)
        (own,) = DivergenceEstimate(model, each.groups, objective.log_probs)([tokens])
        told, gradients = learned(model, own)
        found.append((told, gradients, StepReport(each, 1e9)._flops([own])))
    assert each.shares_prompts and not config.shares_prompts
    (want, whole, flops), (told, gradients, fewer) = found
    assert told == pytest.approx(want, rel=1e-11) and told["kl"] > 0 and fewer < flops
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-10 * float(whole[name].abs().max()))
    shared = share_prompts(tokens.only(tokens.of_documents["role"] != MISMATCHED))
    assert shared.lengths[:9] == [16, 3, 4, 5, 5, 6, 7, 9 + 8 - 1, 1]
    assert shared.prefixes[:7] == (None, 0, 0, 0, None, 4, 4)


def test_a_reply_behind_a_prompt_meets_few_keys_that_it_does_not_see() -> None:
    assert list(_blocks(0, 600, None)) == [(0, 600, 0)], "a triangle, which kernels know"
    assert list(_blocks(10, 600, None)) == [(10, 266, 0), (266, 522, 0), (522, 600, 0)]
    assert list(_blocks(10, 600, 300)) == [(10, 310, 0), (310, 600, 11)]


def test_a_prompt_of_pairs_is_there_once() -> None:
    tokens = pairs(torch.Generator().manual_seed(6))
    shared = share_prompts(tokens)
    # Two pairs of one prompt; filling has no labels, and is one token of each of its documents.
    assert shared.lengths == [16, 5, 4, 6, 4, 5, 7, 4, 8, 4, 8, 9, 4, 1, 1, 1, 1]
    assert shared.prefixes[:8] == (None, 0, 0, 0, 0, None, 5, 5)
    assert shared.predicted == tokens.predicted
    assert shared.of_documents["role"].tolist()[:8] == [0, 1, 2, 1, 2, 0, 1, 2]


def test_pairs_that_would_differ_share_no_prompt(tmp_path: Path) -> None:
    spec_of = {}
    for family in ("llama", "llama_dynamic"):
        save_model(family, tmp_path / family)
        spec_of[family] = spec_from_config(read_config(tmp_path / family))
    dpo: dict[str, object] = dict(task="dpo", grpo=None)
    assert shares_prompts(job_of(tmp_path, **dpo), spec_of["llama"])
    assert not shares_prompts(job_of(tmp_path, **dpo), spec_of["llama_dynamic"]), "rows of a pair are of two lengths"
    for more in ({"neftune_noise_alpha": 5.0}, {"lora": LoraJob(lora_dropout=0.1)}, {"task": "reward"}):
        assert not shares_prompts(job_of(tmp_path, **{**dpo, **more}), spec_of["llama"]), more
