"""`DecodeRecordings`: a stage's layers over a decode batch on a processor, recorded once and replayed for every token.

There is a recording for each number of rows, made when a batch has them for the second time, or later where ways to
make products of few bits are still tried then; whether layers with plain weights are played is chosen before
(`recording_choice`). It reads and writes the same memory each time, so a batch's numbers are copied to where it finds
them. Embedding, cosines and sines, and what comes after the layers are computed as ever.

All batches of as many rows have the same bits, as they are computed by the products that are played, or none is played.
Layers that compute what no kernel stands for (`Recorder.refused`) are never played. The weights are read where they lay
when it was recorded: nothing moves those of a model that is served.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.engine.compute.cache_writer import places_of
from tllm.engine.compute.kv_cache import KVCache, slot_runs
from tllm.engine.compute.positions import positions
from tllm.engine.recording_choice import (
    CACHED_BYTES,
    COMPUTED,
    PLAYED,
    by_turns,
    choices,
    has_plain_products,
    kind_of,
)
from tllm.engine.schedule.batch import Batch, BatchEntry
from tllm.engine.schedule.limits import Limits
from tllm.kernels import product_ways
from tllm.kernels.fastest import Choice
from tllm.kernels.library import DTYPES, Library, kernels_for, library, using
from tllm.kernels.paged_attention import TiledAttention, TileNumbers, fits
from tllm.kernels.recording.held_memory import HeldMemory
from tllm.kernels.recording.host_steps import left_out, taken_by
from tllm.kernels.recording.recorder import Recorder, Recording, recordable
from tllm.kernels.rows.processor_rows import write_codes
from tllm.model.attention import first_heads
from tllm.model.recurrence import Advance
from tllm.model.rope import Rotation, rotations
from tllm.model.transformer import Transformer
from tllm.spec.model_spec import RopeSpec

log = logging.getLogger("tllm.engine")

MOST_ROWS = 32
"""Of a recorded batch: products of more take so long that what lies between them does not count."""


class RecordedSteps(Protocol):
    """A stage's layers over batches of replies, recorded and played: `DecodeGraphs`, or `DecodeRecordings`."""

    def takes(self, batch: Batch) -> bool: ...

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor: ...


class KindNumbers:
    """The tiles of up to so many rows for layers of one kind, each of a token: where a recording finds them."""

    def __init__(self, most: int, most_keys: int, page_size: int, window: int | None) -> None:
        self._page_size, self._window, self._most_keys = page_size, window, most_keys
        most_runs = most * (-(-most_keys // page_size) + 1)
        self._arrays = {
            "runs": torch.zeros(2 * most_runs, dtype=torch.int64),
            "first_run": torch.zeros(most + 1, dtype=torch.int64),
            "first_token": torch.arange(most + 1),
            "first_key": torch.zeros(most, dtype=torch.int64),
            "num_keys": torch.zeros(most, dtype=torch.int64),
        }
        # The same memory, quicker to write to.
        self._runs, self._first_run, self._num_keys = (
            self._arrays[name].numpy() for name in ("runs", "first_run", "num_keys")
        )

    def write(self, entries: tuple[BatchEntry, ...]) -> None:
        """Let the tiles be these."""
        found, firsts = list[int](), [0]
        tokens = [(entry, at) for entry in entries for at in range(entry.start, entry.stop)]
        for row, (entry, at) in enumerate(tokens):
            first_key = 0 if self._window is None else max(0, at + 1 - self._window)
            for run in slot_runs(entry, self._page_size, first_key, at + 1):
                found += (run.start, len(run))
            firsts.append(len(found) // 2)
            self._num_keys[row] = at + 1 - first_key
        self._runs[: len(found)], self._first_run[: len(firsts)] = found, firsts

    def of_rows(self, rows: int) -> TileNumbers:
        """The tiles of the first rows, wherever their numbers change."""
        return TileNumbers(self._arrays, rows, self._most_keys, most_tokens=1)


class HeldInputs(NamedTuple):
    """What recordings read of a batch, for the most rows: rotations, slots of new keys, and tiles by kind besides."""

    x_TD: Tensor
    turned: dict[RopeSpec | None, Rotation | None]
    places: Tensor
    kinds: list[KindNumbers]


class Played(NamedTuple):
    """A recording, and the hidden states that it makes."""

    recording: Recording
    x_TD: Tensor


class DecodeRecordings:
    """The recordings of one stage."""

    def __init__(self, model: Transformer, cache: KVCache, limits: Limits, kernels: Library) -> None:
        self._model, self._cache, self._kernels = model, cache, kernels
        self._layers = list(model.own_layers.values())
        self._most = min(MOST_ROWS, limits.max_num_seqs * (1 + limits.num_speculative_tokens))
        most_keys = min(limits.max_model_len, cache.num_slots)
        kinds = [KindNumbers(self._most, most_keys, cache.page_size, spec.window) for spec in cache.kinds]
        turned = rotations(model.ropes, torch.zeros(self._most, dtype=torch.int64), cache.dtype)
        x_TD = torch.zeros(self._most, model.spec.hidden_size, dtype=cache.dtype)
        self._inputs = HeldInputs(x_TD, turned, torch.zeros(self._most, dtype=torch.int64), kinds)
        self._memory = HeldMemory()
        self.recorded: dict[int, Played | None] = {}
        self.computed: set[int] = set()  # numbers of rows whose batches are faster computed
        self.refused, self._checked = "", False

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is one of replies alone, maybe with draft tokens, without adapters, that may be played."""
        rows = len(batch.token_ids)
        is_plain = batch.is_decode and not any(entry.lora for entry in batch.entries)
        return is_plain and rows <= self._most and rows not in self.computed and not self.refused

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        """The hidden states after the stage's layers; those before them are `x_TD`, of a stage that is not the first.

        They are overwritten by the next call.
        """
        rows = len(batch.token_ids)
        if x_TD is None:
            x_TD = self._model.embed_tokens(torch.tensor(batch.token_ids))
        self._write(batch, x_TD)
        played = self.recorded.get(rows)
        if played is not None:
            played.recording.play()
            return played.x_TD
        if rows in self.recorded:
            return self._record(rows)
        if not self._is_faster_played(rows):
            self.computed.add(rows)
            return self._compute(rows)
        self.recorded[rows] = None
        with using(recordable(self._kernels)):
            return self._compute(rows)

    def _write(self, batch: Batch, x_TD: Tensor) -> None:
        """Write a batch's numbers to where recordings find them."""
        held, rows = self._inputs, len(batch.token_ids)
        held.x_TD[:rows] = x_TD
        for rope, now in rotations(self._model.ropes, positions(batch), self._cache.dtype).items():
            for there, here in zip(held.turned[rope] or (), now or (), strict=True):
                if isinstance(there, Tensor) and isinstance(here, Tensor):
                    there[:rows] = here
        held.places[:rows] = places_of(self._cache, batch.entries)
        for kind in held.kinds:
            kind.write(batch.entries)

    def _is_faster_played(self, rows: int) -> bool:
        if not has_plain_products(self._layers):
            return True
        if not self._checked:
            self._checked = True
            self._recording_of(rows, None)
        kind = kind_of(self._layers, rows, self._model.spec.hidden_size, self._cache.dtype)
        if self.refused or kind.bytes < CACHED_BYTES:
            return not self.refused
        choice = choices.choose(kind, (PLAYED, COMPUTED), partial(self._measure, rows, kind.layers))
        if not choice.seconds:  # refused; layers that are like these in size may be recorded
            choices.known.pop(kind, None)
        return choice.name == PLAYED

    def _measure(self, rows: int, layers: int) -> Choice:
        """Time the first layers over the batch whose numbers are written, without what ranks do together.

        What they leave in the cache is overwritten when the batch itself is computed.
        """
        with taken_by(left_out):
            self._compute(rows, layers)  # products are chosen
            self._try_ways(rows, layers)
            recording = self._recording_of(rows, layers)
            if recording is None:
                return Choice(COMPUTED, {}, is_sure=False)
            return by_turns({PLAYED: recording.play, COMPUTED: partial(self._compute, rows, layers)})

    def _try_ways(self, rows: int, layers: int) -> None:
        """Compute as recordings do until each of their products is made in the way that is the fastest."""
        trials = -1
        with using(recordable(self._kernels)):
            while trials != product_ways.trials_made:
                trials = product_ways.trials_made
                self._compute(rows, layers)

    def _recording_of(self, rows: int, layers: int | None) -> Recording | None:
        """A recording of the first layers, or of all of them, without what ranks do together."""
        recorder = self._recorder(rows)
        with recorder.recording(), taken_by(left_out):
            self._compute(rows, layers)
        recording = recorder.recorded()
        if recording is None:
            self._refuse(recorder.refused)
        return recording

    def _recorder(self, rows: int) -> Recorder:
        return Recorder(self._kernels, self._memory, Fraction(self._most, rows))

    def _record(self, rows: int) -> Tensor:
        recorder, trials = self._recorder(rows), product_ways.trials_made
        with recorder.recording():
            x_TD = self._compute(rows)
        recording = recorder.recorded()
        if recording is None:
            self._refuse(recorder.refused)
        elif trials == product_ways.trials_made:  # else the next batch is recorded, and in time all ways are chosen
            place = self._memory.place_of(x_TD)
            self.recorded[rows] = Played(recording, x_TD if place is None else place)
        return x_TD

    def _refuse(self, what: str) -> None:
        log.debug("replies are not played: %s has no kernel", what)
        self.refused = what
        self.recorded.clear()

    def _compute(self, rows: int, layers: int | None = None) -> Tensor:
        """The layers, or the first ones, over the first rows of the inputs that are held."""
        x_TD, attend = self._inputs.x_TD[:rows], HeldAttend(self._cache, self._inputs, rows)
        turned = {rope: _of_rows(rotation, rows) for rope, rotation in self._inputs.turned.items()}
        for layer in self._layers[:layers]:
            x_TD = layer(x_TD, turned[layer.rope], attend, rows)
        return x_TD


class HeldAttend:
    """The model's `Attend` for replies whose numbers lie where a recording finds them."""

    def __init__(self, cache: KVCache, inputs: HeldInputs, rows: int) -> None:
        self._cache, self._inputs, self._rows = cache, inputs, rows
        self._places = inputs.places[:rows]
        self._readers: dict[int, TiledAttention] = {}

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        there, kernels = self._cache.layers[layer], kernels_for(q_TNH)
        assert kernels is not None, "`decode_recordings` has looked"
        write_codes(kernels, k_TKH, self._places, there.keys, there.key_scales)
        if there.values is not there.keys:
            write_codes(kernels, v_TKH, self._places, there.values, there.value_scales)
        reader = self._readers.get(there.kind)
        if reader is None:
            reader = self._readers[there.kind] = self._reader(kernels, there.kind, q_TNH.shape[1])
        return reader(q_TNH, there.keys, there.values, there.key_scales, there.value_scales, sinks_N)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        raise AssertionError("models with states in place of keys are not recorded")

    def _reader(self, kernels: Library, kind: int, heads: int) -> TiledAttention:
        spec = self._cache.kinds[kind]
        firsts = first_heads(spec, heads, spec.kv_shape[0])
        tiles = self._inputs.kinds[kind].of_rows(self._rows)
        return TiledAttention(kernels, tiles, firsts, spec.scale, spec.softcap or 0.0, spec.window)


def _of_rows(rotation: Rotation | None, rows: int) -> Rotation | None:
    if rotation is None:
        return None
    scale = rotation.query_scale
    return rotation._replace(
        cos=rotation.cos[:rows], sin=rotation.sin[:rows], query_scale=None if scale is None else scale[:rows]
    )


def decode_recordings(model: Transformer, cache: KVCache, limits: Limits) -> DecodeRecordings | None:
    """The recordings of a rank of a stage; None where its layers cannot be recorded.

    That is so without kernels; with states in place of keys; where rope goes by the length of a sequence; and where
    layers have inputs of their own or use what others made.
    """
    kernels = library() if cache.device == CPU else None
    if kernels is None or cache.dtype not in DTYPES or cache.states.layers or model.scales_by_length:
        return None
    carried: Any = model.carried
    if model.layer_inputs is not None or carried.sources or carried.comes or carried.goes:
        return None
    if not cache.kinds or not all(fits(spec.kv_shape[1], (0, model.spec.num_heads)) for spec in cache.kinds):
        return None
    return DecodeRecordings(model, cache, limits, kernels)
