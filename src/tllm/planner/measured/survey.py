"""`Survey`: what the nodes of a cluster and the ways between them were measured to do with one model, as a file.

A pass is some rows through a layer of that very model, in one process with its threads: what products, memory and the
start of operations take there is all in it. No torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Points
from tllm.planner.cost.flops import BACKWARD, attention_flops, layer_flops, logits_flops
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.planner.cost.stage_team import OPERATIONS, read_elements
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec

VERSION = 1
FILE = "survey.json"
REMOVE = "remove it: it is made anew"

ALL = 0.95
"""Of a processor: who had less of it was held back, and sends at the cost of computing."""

Goal = Literal["serve", "train"]


class SurveyedPass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rows` tokens through what one of `ranks` equal ranks holds of a layer, or of the logits: mean seconds.

    They are documents of `length`; or, where there are `keys`, each the next token of a sequence that has so many. A
    pass is forward to serve, forward and backward to train.
    """

    rows: int
    length: int
    ranks: int
    seconds: float
    keys: int = 0


class SurveyedNode(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One node. `memory_bytes`: that it may take, on a machine (`host_name`) whose memory other nodes may share.

    `busy`: processors that it had while it computed. `update`: seconds that an optimizer takes for an element of the
    weights. `turns`: seconds of a driver's step, beside layers and logits, and `follows`: of a stage that follows;
    `cooled`: by which layers take longer in a step, and `rest`: after a wait. `split`: how much longer a pass takes to
    train whose way back is in two halves.
    """

    node: str
    host_name: str
    cores: int
    threads: int
    busy: float
    memory_bytes: int
    layers: tuple[SurveyedPass, ...]
    logits: tuple[SurveyedPass, ...]
    update: float = 0.0
    turns: tuple[SurveyedPass, ...] = ()
    follows: tuple[SurveyedPass, ...] = ()
    cooled: float = 0.0
    rest: float = 0.0
    split: float = 1.0

    @property
    def half_layer(self) -> float | None:
        """Seconds that the half of a layer takes for the fewest rows, if that was measured."""
        halves = [one for one in self.layers if one.ranks == 2]
        return min(halves, key=lambda one: one.rows).seconds if halves else None

    @property
    def driver_step(self) -> float:
        """Seconds of a driver's step for the fewest sequences, beside layers and logits."""
        return _least(self.turns)

    @property
    def follower_step(self) -> float:
        """The same of a stage that follows."""
        return _least(self.follows)

    def slower(self, factor: float) -> SurveyedNode:
        """The same where all that is computed takes `factor` times as long."""
        slowed = {
            name: tuple(msgspec.structs.replace(one, seconds=factor * one.seconds) for one in getattr(self, name))
            for name in ("layers", "logits", "turns", "follows")
        }
        more = {name: factor * getattr(self, name) for name in ("update", "cooled", "rest")}
        return msgspec.structs.replace(self, **slowed, **more)


class SurveyedPath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way from one node to another, by their places among the nodes: seconds one way, bytes per second.

    `meeting`: seconds more that a small sum takes between two ranks that compute in between; `effort`: by which the
    source computes later for each byte that it sends and takes; `brief`: bytes per second of messages of `SHORT_MESSAGE_BYTES`
    at most. `shared`: what each sum of a layer takes more, or less, that both serve, and `hop`: a batch from the one
    to the other in a ring of both, where that was measured.
    """

    source: int
    target: int
    latency: float
    bandwidth: float
    meeting: float = 0.0
    effort: float = 0.0
    brief: float = 0.0
    shared: float | None = None
    hop: float | None = None

    def slower(self, factor: float) -> SurveyedPath:
        """The same where all messages take `factor` times as long."""
        bandwidth, brief = self.bandwidth / factor, self.brief / factor
        return msgspec.structs.replace(self, latency=factor * self.latency, bandwidth=bandwidth, brief=brief)


class Survey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model`: the digest of its spec, so that another's is not taken for it."""

    version: int = VERSION
    model: str
    goal: Goal
    dtype: str
    nodes: tuple[SurveyedNode, ...]
    paths: tuple[SurveyedPath, ...] = msgspec.field(default=(), name="ways")

    def is_of(self, spec: ModelSpec, goal: Goal, dtype: str, machines: Sequence[tuple[str, int]]) -> bool:
        """Whether it tells of this model on nodes of these machines, each (host name, cores), in this order."""
        mine = [(node.host_name, node.cores) for node in self.nodes]
        return (self.model, self.goal, self.dtype, mine) == (digest(spec), goal, dtype, list(machines))

    def named(self, names: Sequence[str]) -> Survey:
        """The same of nodes that have other names now."""
        nodes = zip(self.nodes, names, strict=True)
        return msgspec.structs.replace(
            self, nodes=tuple(msgspec.structs.replace(node, node=name) for node, name in nodes)
        )

    def within(self, given: Mapping[str, int]) -> Survey:
        """The same with no more memory for each node, by its name, than it was given."""
        nodes = [
            msgspec.structs.replace(node, memory_bytes=min(node.memory_bytes, given[node.node])) for node in self.nodes
        ]
        return msgspec.structs.replace(self, nodes=tuple(nodes))

    def slower(self, factor: float) -> Survey:
        """The same where all that is computed takes `factor` times as long, on every node."""
        return msgspec.structs.replace(self, nodes=tuple(node.slower(factor) for node in self.nodes))

    def save(self, path: Path) -> None:
        """Write it for `read_survey`. ConfigError where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", "give a folder that can be written") from error


def read_survey(path: Path) -> Survey | None:
    """A survey that was kept, None where there is none. ConfigError for a file that is none."""
    if not path.is_file():
        return None
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a survey: {error}", REMOVE) from error
    return decoded(raw, str(path))


def decoded(raw: object, where: str) -> Survey:
    """A survey out of plain data. ConfigError for what is none, or has speeds that cannot be."""
    try:
        survey = msgspec.convert(raw, type=Survey)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} is not a survey: {error}", REMOVE) from error
    passes = [one for node in survey.nodes for one in (*node.layers, *node.logits)]
    speeds = [one.seconds for one in passes] + [way.bandwidth for way in survey.paths]
    if survey.version != VERSION or not passes or not all(0 < one < math.inf for one in speeds):
        raise ConfigError(f"{where} is not a survey of version {VERSION} with speeds above 0", REMOVE)
    return survey


def digest(spec: ModelSpec) -> str:
    """Tells models of unlike shapes apart."""
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


def cluster_of(survey: Survey, spec: ModelSpec) -> Cluster:
    """The nodes as devices. Those of one machine share its memory."""
    hosts = [node.host_name for node in survey.nodes]
    count = len(survey.nodes)
    return Cluster(
        names=tuple(node.node for node in survey.nodes),
        devices=tuple(_device(node, hosts.count(node.host_name), survey, spec) for node in survey.nodes),
        node_of=tuple(range(count)),
        inside=(None,) * count,
        pairs=tuple(((way.source, way.target), link_speed(way)) for way in survey.paths),
    )


def link_speed(way: SurveyedPath) -> LinkSpeed:
    """As a link of a cluster."""
    return LinkSpeed(way.latency, way.bandwidth, way.meeting, way.effort, way.brief, way.shared, way.hop)


def _least(passes: Sequence[SurveyedPass]) -> float:
    """Seconds of the one with the fewest rows; none where nothing was measured."""
    return min(passes, key=lambda one: one.rows).seconds if passes else 0.0


def _is_spare(node: SurveyedNode, sharing: int) -> bool:
    """Whether a node of a machine that so many share sends while it computes."""
    return sharing * node.threads < node.cores and node.busy > ALL * node.threads


def _device(node: SurveyedNode, sharing: int, survey: Survey, spec: ModelSpec) -> Device:
    start = _start(node.layers) if survey.goal == "serve" else 0.0
    rates, halves = (
        tuple((float(one.rows), _rate(one, spec, survey.goal, start)) for one in node.layers if one.ranks == ranks)
        for ranks in (1, 2)
    )
    (whole,) = cut_stage(spec, (1,))
    work = 1 + BACKWARD if survey.goal == "train" else 1
    heads = tuple((float(one.rows), work * logits_flops(spec, whole, one.rows) / one.seconds) for one in node.logits)
    return Device(
        memory=node.memory_bytes // sharing,
        flop_rates=((survey.dtype, _in_order(rates)),),
        memory_bandwidth=_read(node.layers, survey, spec, start),
        operation_seconds=start / OPERATIONS,
        logits_rates=((survey.dtype, _in_order(heads)),),
        half_layer_rates=((survey.dtype, _in_order(halves)),) if halves and survey.goal == "train" else (),
        update_seconds=node.update,
        split_backward_factor=node.split,
        driver_seconds=_in_order((float(one.rows), one.seconds) for one in node.turns),
        follower_seconds=_in_order((float(one.rows), one.seconds) for one in node.follows),
        cold_cache_seconds=node.cooled,
        after_wait_seconds=node.rest,
        has_spare_core=_is_spare(node, sharing),
    )


def _read(passes: Sequence[SurveyedPass], survey: Survey, spec: ModelSpec, start: float) -> float:
    """Bytes of weights per second in the pass of the fewest rows, as if its products waited for nothing else."""
    one = min((one for one in passes if one.ranks == 1), key=lambda one: one.rows)
    (whole,) = cut_stage(spec, (1,))
    elements = sum(read_elements(spec, layer, whole, one.rows) for layer in spec.layers)
    flops = sum(layer_flops(spec, layer, whole, (1,) * one.rows) for layer in spec.layers)
    return elements * ITEM_BYTES[survey.dtype] * _rate(one, spec, survey.goal, start) / flops


def _start(passes: Sequence[SurveyedPass]) -> float:
    """Seconds of a layer that no cut makes less: with half of it, of the fewest rows, more than half the time goes."""
    least = min(one.rows for one in passes)
    whole, halves = ([one.seconds for one in passes if (one.rows, one.ranks) == (least, n)] for n in (1, 2))
    return max(0.0, min(2 * halves[0] - whole[0], 0.9 * whole[0])) if whole and halves else 0.0


def _rate(one: SurveyedPass, spec: ModelSpec, goal: Goal, start: float) -> float:
    """Flop/s of a rank's part of a layer, its start left out; of unlike layers of their mean."""
    whole = cut_stage(spec, (1,) * one.ranks)[0]
    lengths = (1,) * one.rows if one.keys else documents(one.rows, one.length)
    flops = sum(
        layer_flops(spec, layer, whole, lengths) + one.rows * one.keys * attention_flops(spec, layer, whole, (1,))
        for layer in spec.layers
    )
    flops /= spec.num_layers
    work = 1 + BACKWARD if goal == "train" else 1
    return work * flops / max(one.seconds - start, 0.1 * one.seconds)


def documents(rows: int, length: int) -> tuple[int, ...]:
    """Rows as documents of a length, the last of what is left."""
    rest = rows % length
    return (length,) * (rows // length) + ((rest,) if rest else ())


def _in_order(points: Iterable[tuple[float, float]]) -> Points:
    return tuple(sorted(points))
