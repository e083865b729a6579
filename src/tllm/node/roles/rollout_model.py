"""`RolloutModel`: a model, whole or a rank's part of it, that samples completions for training runs, with their
weights.

For each run it builds what a rank of its plan would have that trains and samples: the layers, in the run's precision,
and an engine over them. So a completion is the one that the trainer itself would have sampled under this plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import torch

from tllm.core.errors import UNREADABLE, ConfigError, FrameError, PlanError, counted
from tllm.devices.choose import CPU, compute_on
from tllm.node.roles.colocated_rollouts import ColocatedRollouts, colocated_rollouts
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.job import Job, decode_job
from tllm.training.job.rollout_combinations import check_sampling_plan
from tllm.training.policy.rollouts import PromptGroup
from tllm.training.questions.answering_model import AnsweringModel
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
from tllm.training.step.pass_threads import unlike_bits
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.weights.byte_source import ByteSource, LocalFiles


@dataclass(frozen=True)
class RolloutModel:
    """`name` is how it was asked for, `vocabulary` the digest of its tokens, "" where it has none. `weights` are those
    that it has: what a run has too need not travel. Those of a `folder` are compared with what a run has beside an
    adapter; all others came from the run's own cluster. It computes on `device`, as a `rank` of a `plan` with others
    (`groups`); without a plan alone."""

    name: str
    config: dict[str, Any]
    spec: ModelSpec
    vocabulary: str
    weights: ByteSource | None
    folder: Path | None = None
    device: torch.device = CPU
    plan: Plan | None = None
    rank: int = 0
    groups: Groups = field(default_factory=Groups)

    @classmethod
    def open(cls, name: str, device: torch.device = CPU) -> RolloutModel:
        """The model of a folder, or by its name. ConfigError for one that writes nothing."""
        hint = "take the causal language model that the run trains"
        folder, config, spec = AnsweringModel.find_causal(name, "writes nothing", hint)
        weights = LocalFiles(folder) if has_weights(folder) else None
        return cls(name, config, spec, vocabulary_digest(folder), weights, folder, device)

    def open_session(self, run: RolloutRun) -> RolloutSession:
        """A model and an engine of this run's own. ConfigError where this model is not the one that it trains, or the
        device cannot sample for it. The thread that calls this is the one that will ask."""
        if reason := self.refusal(run):
            raise ConfigError(reason)
        return RolloutSession(self, _read(run)[0])

    def refusal(self, run: RolloutRun) -> str:
        """Why this model cannot sample for the run, in words; "" where it can. FrameError for what is no run."""
        job, spec = _read(run)
        if spec != self.spec:
            return f"its model is another: {', '.join(_differences(self.spec, spec))}"
        if self.vocabulary and run.vocabulary and self.vocabulary != run.vocabulary:
            both = f"{self.vocabulary} and {run.vocabulary}"
            return f"its tokens are others: the digests of the two tokenizers are {both}"
        try:
            if self.plan is not None:
                check_sampling_plan(job, self.plan, spec)
        except PlanError as error:
            return error.message
        if reason := unlike_bits(self.plan, job.deterministic):
            return reason
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
        plan = served.plan or Plan.parse("pp=1", served.spec.num_layers)
        config = RankConfig(job, plan, served.spec, served.rank, served.groups, served.device)
        check_device(config)
        compute_on(served.device)
        self._spec, self._model = served.spec, RankModel(config)
        self._fill(served, job)
        is_filled = served.weights is not None and job.lora is None  # what is learned of an adapter comes from the run
        self._weights = HeldWeights(self._model.trained, served.groups.world, is_filled)
        self._rollouts: ColocatedRollouts = colocated_rollouts(config, self._model)
        self._rank, self._room = served.rank, job.seq_len
        self._sampled_with = b""

    def answer(self, question: RolloutQuestion) -> RolloutAnswer:
        """FrameError for bytes that are not what their hashes say, and for prompts that are none."""
        self.check(question)
        return self.compute(question)

    def check(self, question: RolloutQuestion) -> None:
        """On the first rank, which alone knows the hashes of all weights."""
        if isinstance(question, WeightHashes):
            self._weights.check_hashes(question.table, question.hashes)
        elif isinstance(question, WeightBytes):
            self._weights.check(question.numbers, question.contents)
        else:
            if question.root != self._weights.root:
                raise FrameError("prompts to complete with weights that are not those that were sent")
            for group in question.groups:
                self._check(group, group.most_tokens(question.sampling))

    def part_of(self, question: RolloutQuestion, rank: int) -> RolloutQuestion | None:
        """Of weights what the rank holds a part of; prompts go round the ring of stages, which all ranks wait for."""
        if isinstance(question, PromptGroups):
            return msgspec.structs.replace(question, groups=())
        if isinstance(question, WeightHashes):
            return None
        contents = dict(zip(question.numbers, question.contents, strict=True))
        own = self._weights.of_rank(question.numbers, rank)
        return WeightBytes(tuple(own), tuple(contents[number] for number in own)) if own else None

    def compute(self, question: RolloutQuestion) -> RolloutAnswer:
        weights = self._weights
        if isinstance(question, WeightHashes):
            return RolloutAnswer(lacking=tuple(weights.want(question.table, question.hashes)))
        if isinstance(question, WeightBytes):
            weights.put(question.numbers, question.contents)
            if not self._rank:
                weights.confirm(question.numbers)
            return RolloutAnswer()
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
            weights.fill_frozen(self._model.chunks, job.dtype, job.lora.few_bits, device=served.device)
            return
        fill = weights.filler(served.spec, job.seed, job.dtype)
        for chunk in self._model.chunks:
            fill(chunk)

    def _check(self, group: PromptGroup, max_tokens: int) -> None:
        if not group.ids or not group.seeds or len(group.ids) + max_tokens > self._room:
            raise FrameError(
                f"a prompt of {counted(len(group.ids), 'token')} and "
                f"{counted(len(group.seeds), 'completion')} of {max_tokens}, where seq_len is {self._room}"
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
