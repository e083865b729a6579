"""Completions of one prompt that have its tokens once learn what rows that are whole learn, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.post_training.policy_task import grpo
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.data.batch_tensors import Tokens, tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.job.job import Job
from tllm.training.job.job_parts import shares_prompts
from tllm.training.job.lora_job import LoraJob
from tllm.training.objectives.policy_gradient import OLD, REFERENCE, SAMPLED
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import Completion, Turns
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.step.shared_prompts import share_prompts
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
