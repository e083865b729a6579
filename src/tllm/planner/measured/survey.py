"""`Survey`: what the nodes of a cluster and the paths between them were measured to do with one model, as a JSON file.

What is measured is a pass: some rows through one layer of that very model, in one process with its threads. Its seconds
contain what products, memory and the start of operations take there. `cluster_of` derives the speeds of a `Cluster`
from them. The names of the fields are the keys of the file. No torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Points
from tllm.planner.cost.flops import BACKWARD, attention_flops, layer_flops, logits_flops
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.planner.cost.stage_team import OPERATIONS, read_elements
from tllm.planner.cost.weight_bits import mean_linear_bytes
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec

VERSION = 1
FILE = "survey.json"
REMOVE = "remove it: it is made anew"

ALL = 0.95
"""Of each thread's processor: a node that had a smaller share while computing cannot send without slowing that down."""

Goal = Literal["serve", "train"]

Machine = tuple[str, int, str]
"""(host name, processors, what it computes on if not on these)"""


class SurveyedPass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mean time of one pass: forward to serve, forward and backward to train."""

    rows: int
    """Tokens in the pass."""
    length: int
    """Tokens of each document that they are divided into; not used where there are `keys`."""
    ranks: int
    """The pass is through what one of so many equal ranks holds of a layer, or of the logits."""
    seconds: float
    """Mean seconds of the pass."""
    keys: int = 0
    """Where above 0, each row is the next token of its own sequence, which has so many tokens before it."""


class SampledPasses(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node that trains was measured to do when it samples completions; fields as those of `SurveyedNode`."""

    layers: tuple[SurveyedPass, ...]
    logits: tuple[SurveyedPass, ...]
    turns: tuple[SurveyedPass, ...] = ()
    follows: tuple[SurveyedPass, ...] = ()
    unplayed: float = 0.0
    cooled: float = 0.0
    rest: float = 0.0
    keys_read: float = 0.0


class SurveyedNode(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What one node was measured to do. A measurement of 0 or () was not made."""

    node: str
    """The node's name."""
    host_name: str
    """The machine that it runs on, which other nodes may share."""
    cores: int
    """Processors of the machine."""
    threads: int
    """Threads that it computed with."""
    busy: float
    """Processors that it had on an average while it computed (processor seconds per second)."""
    peak: float = 0.0
    """Flop/s of the fastest product of matrices that was found: to train alone, as the measure of MFU."""
    memory_bytes: int
    """Bytes of memory that it had free."""
    given: int | None = None
    """Bytes of memory that it may take at most, this time; None: all it had free. No file keeps them."""
    layers: tuple[SurveyedPass, ...]
    """Passes through one layer; the mean of all, where a model's layers differ."""
    logits: tuple[SurveyedPass, ...]
    """Passes through the output table."""
    update: float = 0.0
    """Seconds that the optimizer takes for one element of the weights."""
    turns: tuple[SurveyedPass, ...] = ()
    """Seconds of the engine's step on the driver, without layers and logits, by sequences (`rows`)."""
    follows: tuple[SurveyedPass, ...] = ()
    """The same on a stage that follows the driver's."""
    unplayed: float = 0.0
    """Seconds by which a layer of a few replies takes longer where its operations are called one by one, and not
    played: as on a grid of ranks."""
    cooled: float = 0.0
    """Seconds by which a stage's layers together take longer in a step than repeated alone, as caches are cold."""
    rest: float = 0.0
    """The same in a step before which the stage had nothing to do."""
    keys_read: float = 0.0
    """Bytes per second of cached keys and values that attention reads, beside weights of few bits, which are read at a
    speed of their own; 0: not measured (plain weights, a device, or too short to tell), then at that of weights."""
    split: float = 1.0
    """How many times longer a training pass takes whose backward pass is split in two (zero bubble schedules)."""
    sampling: SampledPasses | None = None
    """What it does when it samples, for a run that learns from its own completions."""
    device: str = ""
    """What it computes on, whose memory it has, if that is not its machine's processors."""

    @property
    def half_layer(self) -> float | None:
        """Seconds that half of a layer takes for the fewest rows, if that was measured."""
        halves = [measured for measured in self.layers if measured.ranks == 2]
        return min(halves, key=lambda measured: measured.rows).seconds if halves else None

    @property
    def driver_step(self) -> float:
        """Seconds of a driver's step for the fewest sequences, without layers and logits."""
        return _least(self.turns)

    @property
    def follower_step(self) -> float:
        """The same on a stage that follows the driver's."""
        return _least(self.follows)

    def slower(self, factor: float) -> SurveyedNode:
        """The same node if all that is computed took `factor` times as long."""
        sampling = None if self.sampling is None else _slower(self.sampling, factor)
        update, peak = factor * self.update, self.peak / factor
        return msgspec.structs.replace(_slower(self, factor), update=update, peak=peak, sampling=sampling)

    @property
    def is_beside_others(self) -> bool:
        """Whether other programs had processors that it would have computed on."""
        return not self.device and self.busy < ALL * self.threads

    @property
    def as_serving(self) -> SurveyedNode | None:
        """The same node when it samples, if that was measured."""
        found = self.sampling
        if found is None:
            return None
        passes = {name: getattr(found, name) for name in found.__struct_fields__}
        return msgspec.structs.replace(self, **passes, sampling=None)


class SurveyedPath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network path from one node to another, as it was measured (see `LinkSpeed`)."""

    source: int
    """Index of the sending node among the survey's nodes."""
    target: int
    """Index of the receiving node."""
    latency: float
    """Seconds one way."""
    bandwidth: float
    """Bytes per second."""
    meeting: float = 0.0
    """Synchronization overhead: seconds that a small all-reduce takes longer between two ranks that compute in
    between."""
    effort: float = 0.0
    """Seconds that the source's computing takes longer for each byte that it sends and one that it receives."""
    brief: float = 0.0
    """Bytes per second of messages of `SHORT_MESSAGE_BYTES` at most; 0: as `bandwidth`."""
    shared: float | None = None
    """Seconds that each all-reduce in a layer that both nodes serve takes longer (or less, if below 0)."""
    hop: float | None = None
    """Seconds that handing a batch from the one to the other takes longer in a ring of both."""
    hop_bandwidth: float = 0.0
    """Bytes per second of a batch that is handed on, which links carry where sums go otherwise; 0: as `bandwidth`."""

    def slower(self, factor: float) -> SurveyedPath:
        """The same path if all messages took `factor` times as long."""
        rates = {name: getattr(self, name) / factor for name in ("bandwidth", "brief", "hop_bandwidth")}
        return msgspec.structs.replace(self, latency=factor * self.latency, **rates)


class Survey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cluster was measured to do with one model."""

    version: int = VERSION
    model: str
    """The digest of the model's spec, so that a survey of another model is not taken for this one."""
    goal: Goal
    dtype: str
    nodes: tuple[SurveyedNode, ...]
    paths: tuple[SurveyedPath, ...] = msgspec.field(default=(), name="ways")
    intra_host: str = "links"
    """What carried tensors between ranks of one machine."""

    @property
    def has_sampling(self) -> bool:
        """Whether every node was measured when it samples."""
        return all(node.sampling is not None for node in self.nodes)

    def has_measured(self, samples: bool, intra_host: str) -> bool:
        """Whether it tells how nodes sample, if that is asked, and sums inside a machine as they will be made."""
        return self.intra_host == intra_host and (self.has_sampling or not samples)

    def is_of(self, spec: ModelSpec, goal: Goal, dtype: str, machines: Sequence[Machine]) -> bool:
        """Whether it is a survey of this model on nodes of these machines, in this order."""
        mine = [(node.host_name, node.cores, node.device) for node in self.nodes]
        return (self.model, self.goal, self.dtype, mine) == (digest(spec), goal, dtype, list(machines))

    def named(self, names: Sequence[str]) -> Survey:
        """The same survey with other names for the nodes."""
        nodes = zip(self.nodes, names, strict=True)
        return msgspec.structs.replace(
            self, nodes=tuple(msgspec.structs.replace(node, node=name) for node, name in nodes)
        )

    def within(self, given: Mapping[str, int]) -> Survey:
        """The same survey with each node's memory limited to the bytes given for its name, whatever was before."""
        nodes = [msgspec.structs.replace(node, given=given.get(node.node)) for node in self.nodes]
        return msgspec.structs.replace(self, nodes=tuple(nodes))

    def slower(self, factor: float) -> Survey:
        """The same survey if all that is computed took `factor` times as long, on every node."""
        return msgspec.structs.replace(self, nodes=tuple(node.slower(factor) for node in self.nodes))

    def save(self, path: Path) -> None:
        """Write it for `read_survey`. Raises ConfigError where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.within({})), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", "give a folder that can be written") from error


def read_survey(path: Path) -> Survey | None:
    """A saved survey; None where there is no file. Raises ConfigError for a file that is not a survey."""
    if not path.is_file():
        return None
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the survey {path}: {error.strerror}", REMOVE) from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a survey: {error}", REMOVE) from error
    return decoded(raw, str(path))


def decoded(raw: object, where: str) -> Survey:
    """A survey from plain data. Raises ConfigError for what is not a survey, or has speeds that cannot be."""
    try:
        survey = msgspec.convert(raw, type=Survey)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} is not a survey: {error}", REMOVE) from error
    both = [one for node in survey.nodes for one in (node, node.as_serving) if one is not None]
    passes = [measured for node in both for measured in (*node.layers, *node.logits)]
    speeds = [measured.seconds for measured in passes] + [path.bandwidth for path in survey.paths]
    if survey.version != VERSION or not passes or not all(0 < speed < math.inf for speed in speeds):
        raise ConfigError(f"{where} is not a survey of version {VERSION} with speeds above 0", REMOVE)
    return survey


def digest(spec: ModelSpec) -> str:
    """A short hash of a model's shape."""
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


def cluster_of(survey: Survey, spec: ModelSpec) -> Cluster:
    """The surveyed nodes as the devices of a cluster. Nodes of one machine share its memory, or that of a device."""
    hosts = [(node.host_name, node.device) for node in survey.nodes]
    count = len(survey.nodes)
    return Cluster(
        names=tuple(node.node for node in survey.nodes),
        devices=tuple(_device(node, hosts.count((node.host_name, node.device)), survey, spec) for node in survey.nodes),
        node_of=tuple(range(count)),
        inside=(None,) * count,
        pairs=tuple(
            ((path.source, path.target), link_speed(path, bool(survey.nodes[path.source].device)))
            for path in survey.paths
        ),
        hosts=tuple(node.host_name for node in survey.nodes),
    )


def link_speed(path: SurveyedPath, over_devices: bool = False) -> LinkSpeed:
    """A surveyed path as a link of a cluster; `over_devices`: from one that computes on a device."""
    return LinkSpeed(
        path.latency,
        path.bandwidth,
        sync_overhead=max(path.meeting, -path.latency),  # links may be faster by now than when that was measured
        compute_overhead=path.effort,
        short_bandwidth=path.brief,
        layer_sync_overhead=path.shared,
        hop_overhead=path.hop,
        hop_bandwidth=path.hop_bandwidth,
        shares_memory=path.hop_bandwidth > 0 and not over_devices,
    )


Measured = TypeVar("Measured", SurveyedNode, SampledPasses)


def _slower(measured: Measured, factor: float) -> Measured:
    """The same passes, `factor` times as long."""
    slowed = {
        name: tuple(msgspec.structs.replace(old, seconds=factor * old.seconds) for old in getattr(measured, name))
        for name in ("layers", "logits", "turns", "follows")
    }
    more = {name: factor * getattr(measured, name) for name in ("unplayed", "cooled", "rest")}
    return msgspec.structs.replace(measured, **slowed, **more, keys_read=measured.keys_read / factor)


def _least(passes: Sequence[SurveyedPass]) -> float:
    """Seconds of the pass with the fewest rows; 0 where nothing was measured."""
    return min(passes, key=lambda measured: measured.rows).seconds if passes else 0.0


def _is_spare(node: SurveyedNode, sharing: int) -> bool:
    """Whether a node of a machine, or of a device, that so many nodes share can send while it computes. The host of a
    device computes nothing beside it."""
    if node.device:
        return sharing < node.cores
    return sharing * node.threads < node.cores and not node.is_beside_others


def _device(node: SurveyedNode, sharing: int, survey: Survey, spec: ModelSpec) -> Device:
    """A node as a device, one of `sharing` on its machine or its device."""
    serving = node.as_serving
    as_it_serves = msgspec.structs.replace(survey, goal="serve")
    fixed = _fixed_seconds(node.layers) if survey.goal == "serve" else 0.0
    whole_rates, half_rates = (
        tuple(
            (float(measured.rows), _layer_rate(measured, spec, survey.goal, fixed))
            for measured in node.layers
            if measured.ranks == ranks
        )
        for ranks in (1, 2)
    )
    (whole,) = cut_stage(spec, (1,))
    work = 1 + BACKWARD if survey.goal == "train" else 1
    logits_rates = tuple(
        (float(measured.rows), work * logits_flops(spec, whole, measured.rows) / measured.seconds)
        for measured in node.logits
    )
    return Device(
        memory=(node.memory_bytes if node.given is None else min(node.memory_bytes, node.given)) // sharing,
        flop_rates=((survey.dtype, _in_order(whole_rates)),),
        peaks=((survey.dtype, node.peak),) if node.peak else (),
        memory_bandwidth=_memory_bandwidth(node.layers, survey, spec, fixed),
        operation_seconds=fixed / OPERATIONS,
        keys_bandwidth=node.keys_read,
        logits_rates=((survey.dtype, _in_order(logits_rates)),),
        half_layer_rates=((survey.dtype, _in_order(half_rates)),) if half_rates and survey.goal == "train" else (),
        update_seconds=node.update,
        split_backward_factor=node.split,
        driver_seconds=_in_order((float(measured.rows), measured.seconds) for measured in node.turns),
        follower_seconds=_in_order((float(measured.rows), measured.seconds) for measured in node.follows),
        unplayed_seconds=node.unplayed,
        cold_cache_seconds=node.cooled,
        after_wait_seconds=node.rest,
        has_spare_core=_is_spare(node, sharing),
        serving=None if serving is None else _device(serving, sharing, as_it_serves, spec),
    )


def _memory_bandwidth(passes: Sequence[SurveyedPass], survey: Survey, spec: ModelSpec, fixed: float) -> float:
    """Bytes of weights per second in the pass with the fewest rows, as if only reading weights took time there. Those
    that are served are read in the bits that they are held in."""
    fewest = min((measured for measured in passes if measured.ranks == 1), key=lambda measured: measured.rows)
    (whole,) = cut_stage(spec, (1,))
    elements = sum(read_elements(spec, layer, whole, fewest.rows) for layer in spec.layers)
    flops = sum(layer_flops(spec, layer, whole, (1,) * fewest.rows) for layer in spec.layers)
    item = ITEM_BYTES[survey.dtype]
    read = mean_linear_bytes(spec, item) if survey.goal == "serve" else item
    return elements * read * _layer_rate(fewest, spec, survey.goal, fixed) / flops


def _fixed_seconds(passes: Sequence[SurveyedPass]) -> float:
    """Seconds of a layer that no cut makes less, from passes of the fewest rows.

    If a whole layer takes f + w seconds and half of one f + w / 2, then f is twice the half's seconds less the whole's.
    """
    fewest = min(measured.rows for measured in passes)
    whole, halves = (
        [measured.seconds for measured in passes if (measured.rows, measured.ranks) == (fewest, ranks)]
        for ranks in (1, 2)
    )
    return max(0.0, min(2 * halves[0] - whole[0], 0.9 * whole[0])) if whole and halves else 0.0


def _layer_rate(measured: SurveyedPass, spec: ModelSpec, goal: Goal, fixed: float) -> float:
    """Flop/s of a rank's part of a layer without its `fixed` seconds; where layers differ, of their mean."""
    cut = cut_stage(spec, (1,) * measured.ranks)[0]
    lengths = (1,) * measured.rows if measured.keys else documents(measured.rows, measured.length)
    flops = sum(
        layer_flops(spec, layer, cut, lengths)
        + (0 if layer.delta else measured.rows * measured.keys * attention_flops(spec, layer, cut, (1,)))
        for layer in spec.layers
    )
    flops /= spec.num_layers
    work = 1 + BACKWARD if goal == "train" else 1
    return work * flops / max(measured.seconds - fixed, 0.1 * measured.seconds)


def documents(rows: int, length: int) -> tuple[int, ...]:
    """The tokens of each document if `rows` are divided into documents of `length`, the last with what is left."""
    left = rows % length
    return (length,) * (rows // length) + ((left,) if left else ())


def _in_order(points: Iterable[tuple[float, float]]) -> Points:
    return tuple(sorted(points))
