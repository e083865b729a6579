"""Log-probabilities of the same tokens as the engine samples and tells them, and as the trainer finds them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tests.support.training.post_training.policy_task import grpo
from tllm.node.roles.colocated_rollouts import colocated_rollouts
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.data.batch_tensors import tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.job.job import Job
from tllm.training.objectives.policy_gradient import KEPT, SAMPLED, KeepLogProbs
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import PromptGroup, sampling_of
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.weights.byte_source import LocalFiles


def policy_of(folder: Path, dtype: str, length: int) -> tuple[RankConfig, RankModel]:
    """A run in one process that samples completions of so many tokens, four of a prompt, and its model with weights."""
    table = grpo(folder, num_generations=4, max_completion_length=length)
    job = Job(
        output_dir=str(folder / "run"),
        train_files=("none",),
        max_steps=1,
        model_name_or_path=str(folder),
        task="grpo",
        grpo=table,
        seq_len=64,
        global_batch_size=12,
        dtype=dtype,
    )
    raw = read_config(folder)
    spec = spec_from_config(raw)
    config = RankConfig(job, Plan.parse("pp=1", spec.num_layers), spec, 0, Groups())
    model = RankModel(config)
    fill = InitialWeights(LocalFiles(folder), config=raw).filler(spec, 0, dtype)
    for chunk in model.chunks:
        fill(chunk)
    return config, model


def sampled_and_trained(folder: Path, dtype: str, length: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Of 12 completions of 3 prompts, token by token: as the engine told them, as `forward_only` finds them, and as the
    first pass with gradients does."""
    config, model = policy_of(folder, dtype, length)
    dice = random.Random(5)
    prompts = [[dice.randrange(config.spec.vocab_size) for _ in range(count)] for count in (5, 19, 34)]
    groups = [PromptGroup(tuple(ids), tuple(range(9 * place, 9 * place + 4))) for place, ids in enumerate(prompts)]
    completions = colocated_rollouts(config, model).sample(groups, (), sampling_of(config.job))
    rows = [
        completion_row(prompts[number // 4], completion, advantage=0.0) for number, completion in enumerate(completions)
    ]
    tokens = tokens_of(rows)
    alone_T, passed_T = torch.zeros(2, len(tokens.ids_T), dtype=torch.float64)
    alone, passed = (replace(tokens, of_tokens={**tokens.of_tokens, KEPT: room_T}) for room_T in (alone_T, passed_T))
    model.forward_only([alone], KeepLogProbs(whole(config.spec), 1.0, model.is_batch_invariant))
    result = model.forward_backward([passed], 1, 1.0)
    assert result.metrics["clip_ratio/region_mean"].total == 0
    learned_T = tokens.labels_T != IGNORED
    return tokens.of_tokens[SAMPLED][learned_T], alone_T[learned_T], passed_T[learned_T]
