"""Some layers of a model, filled with ordinary numbers, to measure their speed without loading the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group, solo
from tllm.comm.links.link import LocalLink
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.positions import lengths, positions
from tllm.engine.decode_recordings import DecodeRecordings, decode_recordings
from tllm.engine.driver import Deliver, Driver
from tllm.engine.measure.quantized_layers import hold_in_few_bits
from tllm.engine.measure.step_speed import MAX_REPLY_TOKENS, TimedStep, decode_step, follower_step
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import PLAIN_GREEDY, Batch, BatchEntry, encode
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage
from tllm.model.attention import Attend
from tllm.model.transformer import Transformer, build
from tllm.parallel.linear import Adapt, unadapted
from tllm.parallel.mesh import Mesh
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.rank_bytes import layer_parameters
from tllm.planner.cost.weight_bits import mean_linear_bytes
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec

STREAMED_BYTES = 64 * 2**20
"""Bytes of weights that a pass reads, if the model has so many: more than caches hold, as in a whole model."""

WEIGHT = 0.01
"""Every weight: arithmetic on denormal numbers would take another time."""

Work = Callable[[], object]


class BenchmarkLayers:
    """Layers as one of `ranks` equal ranks of a stage has them: alone, or together with the others of the group `tp`.

    They are the model's first layers, `num_layers` of them, taken out of the middle: without embedding and logits.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, ranks: int, tp: Group | None = None) -> None:
        self.spec, self.dtype, self.ranks = spec, dtype, ranks
        tp = tp or solo()
        cut = cut_stage(spec, (1,) * ranks)[tp.rank]
        self.num_layers = num_streamed_layers(spec, dtype, ranks)
        mesh = Mesh(1, 3, range(1, 1 + self.num_layers), tp, cut)
        self.model = build(_with_ends(spec, self.num_layers), mesh, dtype)
        fill(self.model, spec)

    def forward_pass(self, batch: Batch, batches: list[Batch], may_be_played: bool = True) -> Work:
        """A pass of `batch` through the layers, with a cache that has room for each of `batches`.

        It is played where a stage would play it; without `may_be_played` its operations are called one by one.
        """
        pages = max(first + count for one in batches for entry in one.entries for first, count in entry.page_table)
        limits = Limits(
            num_pages=pages,
            vocab_size=self.spec.vocab_size,
            max_model_len=self.spec.max_model_len,
            page_size=PAGE_SIZE,
            num_state_slots=max(len(one.entries) for one in batches),
        )
        cache = self._cache(limits)
        x_TD = torch.ones(len(batch.token_ids), self.model.received_width, dtype=self.dtype)
        recordings = self._recordings(cache, limits, batch) if may_be_played else None
        if recordings is not None:
            return partial(recordings, batch, x_TD)
        return partial(_forward, self.model, cache, batch, x_TD)

    def driver_step(self, sequences: int, prompt: int, deliver: Deliver) -> TimedStep:
        """A driver's step with a token of each of so many sequences, through a model whose ends take no time."""
        stage = self.stage(sequences, prompt, None)
        driver = Driver(stage, Scheduler(stage.limits))
        return TimedStep(stage, partial(decode_step, driver, sequences, prompt, deliver))

    def follower_step(self, sequences: int, prompt: int) -> TimedStep:
        """The same step of a last stage: what comes to it and what it gives passes links inside this process."""
        ring = RingLinks(LocalLink(0, 1), LocalLink(1, 0))
        payload = encode(sampled(batch_of(sequences, 1, prompt)))
        x_TD = torch.ones(sequences, self.model.received_width, dtype=self.dtype)
        stage = self.stage(sequences, prompt, ring, is_first=False)
        return TimedStep(stage, partial(follower_step, stage, ring, payload, x_TD))

    def stage(
        self, sequences: int, prompt: int, ring: RingLinks | None, is_first: bool = True, is_last: bool = True
    ) -> PipelineStage:
        """A stage with room for a reply to each of so many prompts; an end of the model that it has takes no time."""
        max_model_len = prompt + MAX_REPLY_TOKENS
        limits = Limits(
            num_pages=sequences * -(-max_model_len // PAGE_SIZE),
            vocab_size=self.spec.vocab_size,
            max_model_len=max_model_len,
            page_size=PAGE_SIZE,
            enable_prefix_caching=False,  # the prompts are alike, and each sequence is to read pages of its own
            num_state_slots=sequences,
        )
        cache = self._cache(limits)
        model = LayersAsModel(self.model, is_first, is_last, limits.max_num_batched_tokens, self.dtype)
        stage = PipelineStage(model, cache, solo(), ring, limits, [(0, self.spec.vocab_size)])
        recordings = self._recordings(cache, limits, batch_of(sequences, 1, prompt))
        if recordings is not None:
            stage.graphs = PlayedLayers(recordings, model.hidden_TD)
        return stage

    @torch.inference_mode()
    def _recordings(self, cache: KVCache, limits: Limits, batch: Batch) -> DecodeRecordings | None:
        """As a stage has them, if they take such batches: one is recorded. All ranks of a group make as many passes."""
        recordings = decode_recordings(self.model, cache, limits)
        if recordings is None or not recordings.takes(batch):
            return None
        x_TD = torch.ones(len(batch.token_ids), self.model.received_width, dtype=self.dtype)
        for _ in range(2):  # computed, and recorded
            if recordings.takes(batch):
                recordings(batch, x_TD)
            else:
                _forward(self.model, cache, batch, x_TD)
        return recordings if recordings.takes(batch) else None

    def _cache(self, limits: Limits) -> KVCache:
        model = self.model
        return KVCache(model.attention_specs(), limits, self.dtype, model.state_shapes())


class LayersAsModel:
    """Layers in the place of a whole model, or of its first or last stage: embedding and logits are constants."""

    scales_by_length = True

    def __init__(self, model: Transformer, is_first: bool, is_last: bool, rows: int, dtype: torch.dtype) -> None:
        self.model, self.is_first, self.is_last = model, is_first, is_last
        self.received_width = model.received_width
        self.hidden_TD = torch.ones(rows, self.received_width, dtype=dtype)
        self.logits_TV = torch.zeros(rows, model.spec.vocab_size)

    def __call__(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
        ids_T: Tensor | None = None,
    ) -> Tensor:
        out_TD: Tensor = self.model(self.hidden_TD[: len(x)], positions_T, attend, lengths_T, adapt, ids_T)
        return out_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """Zeros."""
        return self.logits_TV[: len(x_TD)]


class PlayedLayers:
    """The same layers as they are played: what comes to them is constant."""

    def __init__(self, recordings: DecodeRecordings, hidden_TD: Tensor) -> None:
        self.takes, self._recordings, self._hidden_TD = recordings.takes, recordings, hidden_TD

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        return self._recordings(batch, self._hidden_TD[: len(batch.token_ids)])


def batch_of(sequences: int, count: int, start: int) -> Batch:
    """A batch of `count` tokens of each of some sequences, from the position `start` on."""
    pages = -(-(start + count) // PAGE_SIZE)
    entries = tuple(
        BatchEntry(i, start, count, start + count, ((i * pages, pages),), state_slot=i) for i in range(sequences)
    )
    return Batch(0, entries, (0,) * (sequences * count))


def sampled(batch: Batch) -> Batch:
    """The batch, after whose entries the likeliest tokens are wanted."""
    entries = tuple(msgspec.structs.replace(entry, sampling=PLAIN_GREEDY) for entry in batch.entries)
    return msgspec.structs.replace(batch, entries=entries)


def num_streamed_layers(spec: ModelSpec, dtype: torch.dtype, ranks: int) -> int:
    """How many layers have `STREAMED_BYTES` of weights on one of `ranks` equal ranks; at most those of the model."""
    largest = largest_layer(spec, cut_stage(spec, (1,) * ranks)[0])
    nbytes = largest * mean_linear_bytes(spec, dtype.itemsize)
    return min(spec.num_layers, max(1, int(STREAMED_BYTES // nbytes)))


def largest_layer(spec: ModelSpec, cut: Cut) -> int:
    """Elements of the largest layer."""
    return max(sum(parameter.elements for parameter in layer_parameters(spec, layer, cut)) for layer in spec.layers)


def fill(model: nn.Module, spec: ModelSpec) -> None:
    """Give every parameter a number of ordinary size, in as many bits as the model's weights are held in."""
    for parameter in model.parameters():
        parameter.fill_(WEIGHT)
    if spec.quantization is not None:
        hold_in_few_bits(model, spec.quantization)


def _forward(model: Transformer, cache: KVCache, batch: Batch, x_TD: Tensor) -> Tensor:
    ids_T, attend = torch.tensor(batch.token_ids), PagedAttend(cache, batch.entries)
    out_TD: Tensor = model(x_TD, positions(batch), attend, lengths(batch), ids_T=ids_T)
    return out_TD


def _with_ends(spec: ModelSpec, count: int) -> ModelSpec:
    """A model whose layers 1 to `count` are this one's first ones, with one more layer before and after them."""
    return dataclasses.replace(spec, layers=(spec.layers[0], *spec.layers[:count], spec.layers[-1]))
