"""`RolloutModel`: a whole model in this process that samples completions for runs elsewhere, with their weights.

Of each run it builds what one rank would that trained and sampled alone: the layers, in the run's precision, and an
engine over them. So a completion is what the trainer itself would have sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tllm.core.errors import UNREADABLE, ConfigError, FrameError
from tllm.devices.choose import CPU, compute_on
from tllm.node.roles.colocated_rollouts import ColocatedRollouts, colocated_rollouts
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.job import Job, decode_job
from tllm.training.policy.rollouts import PromptGroup
from tllm.training.questions.causal_model import CausalModel
from tllm.training.rollout_servers.base_digest import base_digest, has_weights
from tllm.training.rollout_servers.held_weights import HeldWeights
from tllm.training.rollout_servers.rollout_messages import (
    PromptGroups,
    RolloutAnswer,
    RolloutQuestion,
    RolloutRun,
    WeightBytes,
    WeightHashes,
)
from tllm.training.state.initial_weights import STD, InitialWeights
from tllm.training.step.device_limits import check_device
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.weights.byte_source import ByteSource, LocalFiles


@dataclass(frozen=True)
class RolloutModel:
    """`name` is how it was asked for, `vocabulary` the digest of its tokens, "" where it has none. `weights` are those
    that it has: what a run has too need not travel. Those of a `folder` are compared with what a run has beside an
    adapter; all others came from the run's own cluster. It computes on `device`."""

    name: str
    config: dict[str, Any]
    spec: ModelSpec
    vocabulary: str
    weights: ByteSource | None
    folder: Path | None = None
    device: torch.device = CPU

    @classmethod
    def open(cls, name: str, device: torch.device = CPU) -> RolloutModel:
        """The model of a folder, or by its name. ConfigError for one that writes nothing."""
        hint = "take the causal language model that the run trains"
        folder, config, spec = CausalModel.find(name, "writes nothing", hint)
        weights = LocalFiles(folder) if has_weights(folder) else None
        return cls(name, config, spec, vocabulary_digest(folder), weights, folder, device)

    def open_session(self, run: RolloutRun) -> RolloutSession:
        """A model and an engine of this run's own. ConfigError where this model is not the one that it trains, or the
        device cannot sample for it. The thread that calls this is the one that will ask."""
        job, spec = _read(run)
        if reason := self._refusal(run, job, spec):
            raise ConfigError(reason)
        return RolloutSession(self, job)

    def _refusal(self, run: RolloutRun, job: Job, spec: ModelSpec) -> str:
        """Why this model cannot sample for the run, in words; "" where it can."""
        if spec != self.spec:
            return f"its model is another: {', '.join(_differences(self.spec, spec))}"
        if self.vocabulary and run.vocabulary and self.vocabulary != run.vocabulary:
            both = f"{self.vocabulary} and {run.vocabulary}"
            return f"its tokens are others: the digests of the two tokenizers are {both}"
        if job.lora is None:
            return ""
        if self.weights is None:
            return f"an adapter is trained, and {self.folder or self.name} has no weights of the model beside it"
        if self.folder is not None and (base := base_digest(self.folder)) != run.base:
            return f"its weights beside the adapter are others: the digests of the files are {base} and {run.base}"
        return ""


class RolloutSession:
    """One run's model, whose weights become those that it sends, and the engine that samples with them."""

    def __init__(self, served: RolloutModel, job: Job) -> None:
        plan = Plan.parse("pp=1", served.spec.num_layers)
        config = RankConfig(job, plan, served.spec, 0, Groups(), served.device)
        check_device(config)
        compute_on(served.device)
        self._spec, self._model = served.spec, RankModel(config)
        self._fill(served, job)
        self._weights = HeldWeights(self._model.trained)
        self._rollouts: ColocatedRollouts = colocated_rollouts(config, self._model)
        self._room = job.seq_len
        self._sampled_with = b""

    def answer(self, question: RolloutQuestion) -> RolloutAnswer:
        """FrameError for bytes that are not what their hashes say, and for prompts that are none."""
        if isinstance(question, WeightHashes):
            return RolloutAnswer(lacking=tuple(self._weights.want(question.table, question.hashes)))
        if isinstance(question, WeightBytes):
            self._weights.put(question.numbers, question.contents)
            return RolloutAnswer(lacking=tuple(self._weights.lacking))
        if question.root != self._weights.root:
            raise FrameError("prompts to complete with weights that are not those that were sent")
        for group in question.groups:
            self._check(group, group.most_tokens(question.sampling))
        # Turns that go on may be the first that come to this server since the weights changed.
        goes_on = question.sampling.goes_on and question.root == self._sampled_with
        self._sampled_with = question.root
        sampling = question.sampling._replace(goes_on=goes_on)
        found = self._rollouts.sample(question.groups, question.stop_ids, sampling)
        return RolloutAnswer(question.number, completions=tuple(found))

    def failed(self, question: RolloutQuestion, reason: str) -> RolloutAnswer:
        return RolloutAnswer(question.number if isinstance(question, PromptGroups) else 0, error=reason)

    def close(self) -> None:
        self._rollouts.close()
        self._model.close()

    def _fill(self, served: RolloutModel, job: Job) -> None:
        """Give the model the weights that are here, if there are any: what differs from the run's will come."""
        if served.weights is None:
            return
        std = served.config.get("initializer_range")
        weights = InitialWeights(served.weights, STD if std is None else float(std), served.config)
        if job.lora is not None:
            weights.fill_frozen(self._model.chunks, job.dtype, job.lora.few_bits)
            return
        fill = weights.filler(served.spec, job.seed, job.dtype)
        for chunk in self._model.chunks:
            fill(chunk)

    def _check(self, group: PromptGroup, max_tokens: int) -> None:
        if not group.ids or not group.seeds or len(group.ids) + max_tokens > self._room:
            raise FrameError(
                f"a prompt of {len(group.ids)} tokens and {len(group.seeds)} completions of {max_tokens}, where "
                f"seq_len is {self._room}"
            )
        if min(group.ids) < 0 or max(group.ids) >= self._spec.vocab_size:
            raise FrameError(f"a prompt with a token that is not of {self._spec.vocab_size}")


def _read(run: RolloutRun) -> tuple[Job, ModelSpec]:
    """FrameError for what is no run."""
    try:
        job, config = decode_job(run.job), json.loads(run.config)
    except (*UNREADABLE, ValueError) as error:
        raise FrameError(f"what a run is introduced by cannot be read: {error}") from error
    if job.rollouts is None or not isinstance(config, dict):
        raise FrameError(f"a run of the task {job.task!r}, which samples nothing")
    return job, spec_from_config(config)


def _differences(ours: ModelSpec, theirs: ModelSpec) -> Iterator[str]:
    """The first fields that are not the same, with both values where these are short."""
    unlike = [one.name for one in fields(ours) if getattr(ours, one.name) != getattr(theirs, one.name)]
    for name in unlike[:4]:
        both = f"{name} is {getattr(ours, name)} and the run's {getattr(theirs, name)}"
        yield both if len(both) < 100 else name
