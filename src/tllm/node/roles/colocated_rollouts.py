"""`ColocatedRollouts`: an inference engine over the ranks of a training replica, which samples with the weights that
are trained.

Trainer and engine share one model: the layers that a rank trains are those that its stage of the engine computes with,
in the same memory and on the same device, and so is an adapter that is trained beside them. The engine's messages go
over the links of the replica's ranks, which nothing else uses meanwhile.

A learner moves the weights to memory of its own when it begins, and from then on changes them in place. Recorded layers
(`DecodeGraphs`, `DecodeRecordings`) read the weights at the addresses that they had, so each sampling first checks that
they are still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch

from tllm.core.errors import RequestError
from tllm.engine.assembly import make_stage
from tllm.engine.decode_graphs import addresses_of, decode_graphs
from tllm.engine.decode_recordings import RecordedSteps, decode_recordings
from tllm.engine.driver import Driver
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.limits import EngineConfig, Limits, limits_of
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage
from tllm.kernels.library import library, using
from tllm.kernels.recording.recorder import recordable
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import mesh_of
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request, SamplingParams
from tllm.training.job.job_parts import sampling_facts
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder
from tllm.training.step.rank_groups import Groups, RankConfig
from tllm.training.step.rank_model import RankModel

POLICY = "policy"
"""What requests call the adapter that is trained, where one is."""


def colocated_rollouts(config: RankConfig, model: RankModel) -> ColocatedRollouts:
    """What samples on this rank with the weights of `model`."""
    (chunk,) = model.chunks  # as `rollout_combinations` has checked
    plan, groups = config.plan, config.groups
    mesh = mesh_of(config.spec, plan, config.rank, groups.tp)
    limits = rollout_limits(config)
    stage = make_stage(chunk, mesh, plan, ring_of(plan, mesh.stage, groups), limits, trained_on=config.device)
    for adapter in model.adapters:
        stage.adapters.add(POLICY, adapter.of_linear)
    layers = None if model.adapters else RecordedLayers(chunk, stage, config.job.deterministic)
    one_by_one = config.job.deterministic and not model.is_batch_invariant
    is_first = mesh.stage == 0 and groups.tp.rank == 0
    return ColocatedRollouts(config, stage, layers, model.adapters, is_first, one_by_one)


def rollout_limits(config: RankConfig) -> Limits:
    """The sizes of the engine: room for as many whole sequences as are computed at once."""
    job, sampling = config.job, sampling_facts(config.job)
    assert sampling is not None, "asked where a run samples"
    sizes = EngineConfig(
        dtype=job.dtype,
        max_model_len=job.seq_len,
        cache_tokens=sampling.cached_tokens,
        max_num_seqs=sampling.at_once,
        max_num_batched_tokens=sampling.batch_tokens,
    )
    return limits_of(config.spec, Plan(config.plan.stages, config.plan.experts), sizes)


def ring_of(plan: Plan, stage: int, groups: Groups) -> RingLinks | None:
    """The links of a stage's first rank to those of the stages around it; None on other ranks, and of one stage."""
    if plan.pp == 1 or groups.tp.rank:
        return None
    leaders = [0, *accumulate(one.tp for one in plan.stages)][: plan.pp]
    before, after = leaders[stage - 1], leaders[(stage + 1) % plan.pp]
    return RingLinks(groups.replica.recv[before], groups.replica.send[after])


class RecordedLayers:
    """The layers of a stage as they are recorded for replies, where they can be, of the weights as they lie now.

    What requests with an adapter ask for is not recorded. Nor are layers on a processor where a run is `deterministic`,
    as it is measured whether they are played or computed, which differ by rounding.
    """

    def __init__(self, model: Transformer, stage: PipelineStage, deterministic: bool) -> None:
        self._model, self._stage, self._deterministic = model, stage, deterministic
        self._addresses: tuple[int, ...] = ()

    @torch.inference_mode()
    def follow_weights(self) -> None:
        """Record the layers, if that is not done yet or the weights have moved since."""
        stage, now = self._stage, addresses_of(self._model)
        if stage.graphs is None or self._addresses != now:
            stage.graphs = None  # its memory is for the next
            stage.graphs, self._addresses = self._recorded(), now

    def _recorded(self) -> RecordedSteps | None:
        stage = self._stage
        graphs = decode_graphs(self._model, stage.cache, stage.limits) if stage.tp.size == 1 else None
        if graphs is not None or self._deterministic:
            return graphs
        return decode_recordings(self._model, stage.cache, stage.limits)


class ColocatedRollouts:
    """One rank's part in sampling. What is known of prompts in the cache is the scheduler's, which lives for one call
    and those that go on after it: then the weights are others. `one_by_one`: no group of completions is computed beside
    another, nor after what others have left in the cache."""

    def __init__(
        self,
        config: RankConfig,
        stage: PipelineStage,
        layers: RecordedLayers | None,
        adapters: Sequence[TrainedAdapter],
        is_first: bool,
        one_by_one: bool,
    ) -> None:
        self._plan, self._eos_ids = config.plan, config.spec.eos_token_ids
        self._replica = config.plan.coordinates(config.rank).replica
        self._stage, self._layers, self._adapters = stage, layers, adapters
        self._is_first, self._one_by_one = is_first, one_by_one
        self._lora = POLICY if config.job.lora is not None else ""
        self._scheduler = self._new_scheduler()

    @property
    def metrics(self) -> dict[str, float]:
        """Nothing that others do not tell."""
        return {}

    def share(self, order: RolloutOrder) -> Sequence[PromptGroup]:
        return order.groups[self._replica]

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        with self._products():
            return self._sample(groups, stop_ids, sampling)

    def close(self) -> None:
        self._stage.pages.close()

    def _products(self) -> AbstractContextManager[None]:
        """Where each group is computed by itself, to have the same bits everywhere, only the kernel's: which of all is
        the fastest is measured, and they differ by rounding."""
        kernels = library() if self._one_by_one else None
        return nullcontext() if kernels is None else using(recordable(kernels))

    def _sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        if self._layers is not None:
            self._layers.follow_weights()
        for adapter in self._adapters:
            adapter.hold_factors()
        if not self._is_first:
            self._stage.serve()
            return []
        if not self._one_by_one:
            if not sampling.goes_on:
                self._scheduler = self._new_scheduler()
            return self._sampled(self._scheduler, groups, stop_ids, sampling)
        # Products are not batch-invariant: a group that is alone is rounded alike wherever it is sampled.
        each = (self._sampled(self._new_scheduler(), [group], stop_ids, sampling) for group in groups)
        return [one for completions in each for one in completions]

    def _new_scheduler(self) -> Scheduler:
        """One that knows of nothing in the cache."""
        return Scheduler(self._stage.limits, self._plan.pp, self._eos_ids)

    def _sampled(
        self, scheduler: Scheduler, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        """The completions of these groups, all computed together."""
        driver = Driver(self._stage, scheduler)
        requests = [
            Request(
                id=f"{place}-{number}",
                prompt_ids=group.ids,
                params=_params(sampling, group, number, stop_ids),
                lora=self._lora,
            )
            for place, group in enumerate(groups)
            for number in range(len(group.seeds))
        ]
        told: dict[str, list[Output]] = {request.id: [] for request in requests}
        outputs = [output for request in requests for output in driver.submit(request)]
        while True:
            for output in outputs:
                told[output.request_id].append(output)
            if not driver.has_work:
                break
            outputs = driver.step()
        driver.close()
        return [_completion(told[request.id]) for request in requests]


def _params(sampling: CompletionSampling, group: PromptGroup, number: int, stop_ids: Sequence[int]) -> SamplingParams:
    return SamplingParams(
        max_tokens=group.most_tokens(sampling),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=group.seeds[number],
        stop_token_ids=tuple(stop_ids),
        logprobs=0,
        tempered_logprobs=True,
    )


def _completion(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    if last.finish_reason == "error":
        raise last.failure()
    if last.finish_reason not in ("stop", "length"):
        raise RequestError(f"a completion ended as {last.finish_reason}")
    return Completion(
        tuple(token for output in outputs for token in output.token_ids),
        tuple(one.logprob for output in outputs for one in output.logprobs),
        last.finish_reason == "length",
    )
