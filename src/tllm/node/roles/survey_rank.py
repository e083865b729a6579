"""`SurveyRank`: one node's part in a survey. It is a `DoctorRank` that measures itself with the model's layers."""

from __future__ import annotations

import json
import socket
import time
from functools import partial
from typing import Any

import msgspec
import torch

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Findings
from tllm.cluster.settings import SurveySettings
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.intra_host import connect_devices
from tllm.comm.collectives.tuning import max_over_ranks
from tllm.comm.links.connect import Listener
from tllm.core.memory import LARGEST_TRAINED, keep_freed_memory, rss_bytes
from tllm.devices.choose import CPU, check_float64
from tllm.devices.memory import available_memory, device_name, give_back_device_memory
from tllm.engine.driver import Deliver
from tllm.engine.measure.device_layer_speed import device_serving_passes
from tllm.engine.measure.layer_speed import ServingSizes, serving_passes
from tllm.engine.measure.ring_speed import ring_step_overhead
from tllm.engine.measure.shared_layer_speed import shared_layer_seconds
from tllm.engine.ring_links import RingLinks
from tllm.node.machine.machine_facts import NetworkPath, machine_facts
from tllm.node.machine.process_facts import cores
from tllm.node.roles.control import Control
from tllm.node.roles.doctor_rank import ANSWER, DoctorRank
from tllm.node.roles.role import Role
from tllm.node.roles.sum_latency import Met, measure_sums
from tllm.parallel.collectives import sum_in_memory
from tllm.planner.measured.survey import SampledPasses, SurveyedNode
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Wire
from tllm.training.measure.pass_speed import training_passes
from tllm.training.measure.peak_flops import matrix_peak
from tllm.training.optim.optimizer import SGD, AdamW
from tllm.weights.byte_source import Fetch
from tllm.weights.dtypes import torch_dtype

PEAK_PART, PEAK_SECONDS = 0.05, 0.2
"""Of the time of a survey, and at most: how long each of two looks for the fastest product takes."""


class SurveyRank(DoctorRank):
    """Sends `Findings`: a `SurveyedNode` for itself, a `NetworkPath` or a `Met` for another node."""

    result_type = Findings

    def __init__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None = None
    ) -> None:
        self._spec, self._epoch = spec_from_config(json.loads(assign.config)), assign.epoch
        super().__init__(assign, identity, listener, fetch, before)

    def run(self, control: Control) -> None:
        self._deliver = partial(control.deliver, self._epoch)
        super().run(control)

    def examine(self) -> SurveyedNode:
        """This node, measured with this model."""
        assert isinstance(self.settings, SurveySettings), "a survey"
        return examined(self._names[self.rank], self._spec, self.settings, self._deliver)

    def probe(self, target: int, meet: bool) -> NetworkPath | Met:
        """The network path to another rank, or how long sums with it take."""
        if not meet:
            return self.path_to(target)
        there, back = self._links[Wire(self.rank, target, ANSWER)], self._links[Wire(target, self.rank, ANSWER)]
        place = int(self.rank > target)
        group = Group(place, 2, {1 - place: there}, {1 - place: back}, "survey")
        return self._measure_sums(group, RingLinks(back, there))

    def _measure_sums(self, group: Group, ring: RingLinks) -> Met:
        """How long sums with another rank take. To serve, also a turn round a ring of both, and a layer that both
        share, if it can be divided.

        The latter two only where both compute on processors: layers on a device cannot be timed within a step.
        """
        assert isinstance(self.settings, SurveySettings), "a survey"
        serves, seconds = bool(self.settings.sequences), self.settings.way_seconds
        device = torch.device(self.settings.device)
        if self.settings.intra_host == "nccl":
            connect_devices(group, self._hosts[self.rank], device, self.settings.link_seconds)
        elif self.settings.intra_host == "memory" and serves:
            hosts = [self._hosts[rank] for rank in (self.rank, ring.previous.source)]
            sum_in_memory(group, hosts, device == CPU, self.settings.link_seconds)
        try:
            met = measure_sums(group, seconds, not serves, device)
        finally:
            group.close_devices()
        if not serves or max_over_ranks(group, float(device != CPU)):
            return met
        dtype, prompt = torch_dtype(self.settings.dtype), self.settings.length
        turn = ring_step_overhead(self._spec, dtype, ring, group.rank, seconds, self._deliver)
        shared = shared_layer_seconds(self._spec, dtype, group, prompt, seconds) if self._spec.num_heads > 1 else None
        return msgspec.structs.replace(met, ring=turn, shared=shared)


def examined(
    node: str, spec: ModelSpec, settings: SurveySettings, deliver: Deliver = lambda outputs: None
) -> SurveyedNode:
    """The process of this node, measured for about as long as the settings say; tokens that it makes are delivered.

    ConfigError for what its device cannot serve.
    """
    dtype, seconds, device = torch_dtype(settings.dtype), settings.measure_seconds, torch.device(settings.device)
    check_float64(device)
    free = machine_facts().memory_free_bytes + rss_bytes() if device == CPU else available_memory(device)

    def serving(sizes: ServingSizes, seconds: float) -> dict[str, Any]:
        if device == CPU:
            return serving_passes(spec, dtype, sizes, seconds, deliver)._asdict()
        return device_serving_passes(spec, dtype, sizes, device, free, seconds, deliver)._asdict()

    begun, used, peak = time.perf_counter(), time.process_time(), 0.0
    if settings.sequences:
        passes = serving(ServingSizes(settings.sequences, settings.length, settings.rows[0]), seconds)
        rested = passes.pop("rested")
    else:
        keep_freed_memory(LARGEST_TRAINED)
        optimizer = SGD() if settings.optimizer == "sgd" else AdamW()
        share = 2 if settings.rollouts else 1
        through = settings.length, settings.rows
        part = min(PEAK_PART * seconds, PEAK_SECONDS)
        peak = matrix_peak(dtype, part, device)  # and once more: other programs may run just now
        passes = training_passes(spec, dtype, *through, optimizer, seconds / share - 2 * part, device)._asdict()
        peak = max(peak, matrix_peak(dtype, part, device))
        rested = 0.0
        if settings.rollouts:
            found = serving(ServingSizes(settings.rollouts, settings.prompt, settings.prompt), seconds / share)
            rested = found.pop("rested")
            passes["sampling"] = SampledPasses(**found)
    give_back_device_memory(device)
    return SurveyedNode(
        node=node,
        host_name=socket.gethostname(),
        cores=cores(),
        threads=torch.get_num_threads(),
        busy=(time.process_time() - used) / (time.perf_counter() - begun - rested),
        memory_bytes=free,
        peak=peak,
        device="" if device == CPU else device_name(device),
        **passes,
    )
