"""The parts of a plan's short form, `pp=2,tp=1+2,layers=10+22`: reading one value, refusing what is none.

Who holds what and who computes what: the `Plan` and its two written forms, the short one (`pp=2,tp=2`) and JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError, PlanError, nearest
from tllm.spec import plan as text_of
from tllm.spec.pipeline_schedule import CHUNKED, ORDERS, Depth

WORDS = {"true": True, "false": False}


def pairs(text: str, keys: Collection[str]) -> dict[str, str]:
    """The values by key, each key once."""
    given: dict[str, str] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if key not in keys or not equals or not value:
            raise PlanError(f"plan {text!r}: {part!r} is not understood", nearest(key, keys))
        if key in given:
            raise PlanError(f"plan {text!r} gives {key} twice", "give it once")
        given[key] = value
    return given


def number(text: str, key: str, least: int = 1) -> int:
    """A whole number."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise PlanError(f"{key}={text!r} is not a whole number of {least} or more", f"for example {key}=2")
    return int(text)


def numbers(text: str, key: str, between: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers joined by `between`; 2*62 stands for 62 times 2."""
    found: list[int] = []
    for part in text.split(between):
        one, _, times = part.partition("*")
        found += [number(one, key, least)] * (number(times, key) if times else 1)
    return tuple(found)


def choice(text: str, key: str, known: Sequence[str]) -> str:
    """One of the known words."""
    if text not in known:
        raise PlanError(f"{key}={text} is not known", f"one of {', '.join(known)}")
    return text


def truth(text: str, key: str) -> bool:
    """`true` or `false`."""
    return WORDS[choice(text, key, tuple(WORDS))]


def bounds(layers: Sequence[int], runs: int, num_layers: int) -> list[int]:
    """Where each run of layers starts, and the end. Left out: as even as can be, the later ones taking what is over."""
    if not layers:
        return [num_layers * i // runs for i in range(runs + 1)]
    counts = layers if len(layers) == runs else tuple(layers) * runs
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def shares_of(lists: Sequence[tuple[int, ...]], stage: int, tps: Sequence[int]) -> tuple[int, ...]:
    """The shares of one stage's ranks: even, from its own list, or from the one list for stages of that many ranks."""
    tp = tps[stage]
    if not lists:
        return (1,) * tp
    if len(lists) > 1:
        if len(lists[stage]) != tp:
            raise PlanError(f"stage {stage} has tp={tp} and {len(lists[stage])} shares", "give one share for each rank")
        return lists[stage]
    if len(lists[0]) not in tps:
        raise PlanError(
            f"shares {':'.join(map(str, lists[0]))} are for {len(lists[0])} ranks and no stage has so many "
            f"(tp={list(tps)})",
            "give as many shares as a stage has ranks",
        )
    return lists[0] if len(lists[0]) == tp else (1,) * tp


def ranks(given: dict[str, str]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The tp of the stages and the lists of shares, as given."""
    tps = numbers(given.get("tp", "1"), "tp", "+")
    lists = [numbers(one, "shares", ":") for one in given.get("shares", "").split("+") if one]
    return tps, lists


def stages(
    text: str,
    given: dict[str, str],
    chunks: int,
    tps: tuple[int, ...],
    shares: list[tuple[int, ...]],
    layers: tuple[int, ...],
) -> int:
    """How many pipeline stages the lists speak of."""
    counts = [len(one) for one in (tps, shares) if len(one) > 1]
    if len(layers) > 1:
        if len(layers) % chunks:
            raise PlanError(
                f"plan {text!r} gives layers of {len(layers)} runs and chunks={chunks}", "give stages times chunks runs"
            )
        counts.append(len(layers) // chunks)
    pp = number(given["pp"], "pp") if "pp" in given else max(counts, default=1)
    if any(count != pp for count in counts):
        raise PlanError(
            f"plan {text!r} speaks of {pp} stages and of {next(count for count in counts if count != pp)}",
            "give one value for all stages, or one for each, joined by +",
        )
    return pp


def replicas(text: str) -> tuple[int, ...]:
    shares = numbers(text, "dp", ":")
    return (1,) * shares[0] if len(shares) == 1 else shares


def depth(text: str) -> int | tuple[int, ...]:
    depths = numbers(text, "depth", "+", 0)
    return depths[0] if len(depths) == 1 else depths


Experts = Literal["cut", "spread"]
Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "layer", "selective"]
Offload = Literal["none", "host", "disk"]

SERVING = ("pp", "tp", "layers", "shares", "experts")
TRAINING = ("dp", "cp", "ep", "zero", "schedule", "depth", "chunks", "sequence", "recompute", "offload", "servers")
KEYS = SERVING + TRAINING
CHOICES = {
    "experts": ("cut", "spread"),
    "zero": ("0", "1", "2", "3"),
    "schedule": tuple(ORDERS),
    "recompute": ("none", "layer", "selective"),
    "offload": ("none", "host", "disk"),
}


class Wire(NamedTuple):
    """One directed tensor wire between two ranks; `name` tells several between the same two apart."""

    source: int
    target: int
    name: str = ""


class Coordinates(NamedTuple):
    """A rank's place on each axis of the mesh."""

    replica: int
    stage: int
    cp: int
    tp: int


class Stage(msgspec.Struct, frozen=True):
    """Layers [start, stop) held by `len(shares)` tensor-parallel ranks, in proportion to their `shares`."""

    start: int
    stop: int
    shares: tuple[int, ...] = (1,)

    @property
    def tp(self) -> int:
        return len(self.shares)


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model over ranks: replicas, in them stages, in these context-parallel and, fastest, tensor-parallel ranks.

    `experts` says how a mixture-of-experts layer is cut inside a stage: each expert by its width ("cut"),
    or whole experts to different ranks ("spread"). Either way the layer ends in the same one sum.

    The rest is for training, and changes where the work happens but no number. `dp` are the replicas' shares of the
    microbatches. `ep` replicas in a row hold different experts and send each other tokens. With `chunks` a stage has
    several runs of layers: `stages` then lists runs, in the model's order, and run c * pp + s is chunk c of stage s.
    `servers` are further ranks that keep weights and state for the replicas (the parameter-server architecture).
    """

    stages: tuple[Stage, ...]
    experts: Experts = "cut"
    dp: tuple[int, ...] = (1,)
    cp: int = 1
    ep: int = 1
    zero: Zero = 0
    schedule: str = "1f1b"
    depth: Depth = 1
    chunks: int = 1
    sequence: bool = False
    recompute: Recompute = "none"
    offload: Offload = "none"
    servers: int = 0

    @property
    def pp(self) -> int:
        return len(self.stages) // self.chunks

    @property
    def replicas(self) -> int:
        return len(self.dp)

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.cp * sum(stage.tp for stage in self.stages[: self.pp])

    @property
    def world_size(self) -> int:
        return self.replicas * self.replica_size + self.servers

    @property
    def runs(self) -> list[range]:
        """The layers of every run, in the model's order."""
        return [range(stage.start, stage.stop) for stage in self.stages]

    def coordinates(self, rank: int) -> Coordinates:
        """Where a global rank stands; servers stand nowhere."""
        if not 0 <= rank < self.replicas * self.replica_size:
            raise PlanError(f"rank {rank} is not in a plan of {self.world_size} ranks")
        replica, left = divmod(rank, self.replica_size)
        stage = 0
        while left >= self.cp * self.stages[stage].tp:
            left -= self.cp * self.stages[stage].tp
            stage += 1
        return Coordinates(replica, stage, *divmod(left, self.stages[stage].tp))

    def rank_of(self, at: Coordinates) -> int:
        """The global rank that stands there."""
        before = self.cp * sum(stage.tp for stage in self.stages[: at.stage])
        return at.replica * self.replica_size + before + at.cp * self.stages[at.stage].tp + at.tp

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, tp rank) of a global rank."""
        at = self.coordinates(rank)
        return at.stage, at.tp

    def ranks(self, stage: int) -> range:
        """Global ranks of a stage, of the first replica."""
        first = self.cp * sum(s.tp for s in self.stages[:stage])
        return range(first, first + self.cp * self.stages[stage].tp)

    def check(self, num_layers: int) -> None:
        """Refuse a plan that does not hold each of `num_layers` layers exactly once, or counts that are none."""
        if not self.stages:
            raise PlanError("the plan has no stage", "write at least pp=1")
        at = 0
        for index, stage in enumerate(self.stages):
            if stage.start != at:
                fault = "twice" if stage.start < at else "nowhere"
                raise PlanError(
                    f"layers [{min(at, stage.start)}, {max(at, stage.start)}) are held {fault}: "
                    f"stage {index} starts at {stage.start}, not at {at}",
                    "let each stage start where the one before it stops",
                )
            if stage.stop <= stage.start:
                raise PlanError(
                    f"stage {index} holds no layer: [{stage.start}, {stage.stop})",
                    f"a model of {num_layers} layers makes at most {num_layers} stages",
                )
            if not stage.shares or min(stage.shares) < 1:
                raise PlanError(f"stage {index} has shares {stage.shares}", "give each rank a share of 1 or more")
            at = stage.stop
        if at != num_layers:
            raise PlanError(
                f"the plan holds {at} layers and the model has {num_layers}",
                f"give layers that add up to {num_layers}",
            )
        self._check_counts()

    def check_serving(self) -> None:
        """Refuse what only training knows."""
        plain = Plan(self.stages, self.experts)
        for name in TRAINING:
            if getattr(self, name) != getattr(plain, name):
                raise PlanError(f"{name} of plan {self} is for training", f"leave {name} out, or run `tllm train`")

    def __str__(self) -> str:
        """The short form; `Plan.parse` reads it back."""
        pipeline = self.stages[: self.pp]
        parts = [f"pp={self.pp}", "tp=" + "+".join(str(s.tp) for s in pipeline)]
        parts.append("layers=" + "+".join(str(s.stop - s.start) for s in self.stages))
        if any(len(set(s.shares)) > 1 for s in pipeline):
            parts.append("shares=" + "+".join(":".join(map(str, s.shares)) for s in pipeline))
        if self.dp != (1,):
            parts.append(f"dp={self.replicas}" if set(self.dp) == {1} else "dp=" + ":".join(map(str, self.dp)))
        if isinstance(self.depth, tuple):
            parts.append("depth=" + "+".join(map(str, self.depth)))
        elif self.depth != 1:
            parts.append(f"depth={self.depth}")
        plain = Plan(self.stages)
        for name in ("experts", "cp", "ep", "zero", "schedule", "chunks", "recompute", "offload", "servers"):
            if getattr(self, name) != getattr(plain, name):
                parts.append(f"{name}={getattr(self, name)}")
        return ",".join([*parts, *(["sequence=true"] if self.sequence else [])])

    @classmethod
    def parse(cls, text: str, num_layers: int) -> Plan:
        """Read the short form `pp=2,tp=1+2,layers=10+22,shares=1:3`, or a JSON file's path.

        `tp` and `layers` take one number for all stages or one for each, joined by "+". `shares` takes one list for
        every stage with that many ranks, or one for each stage. What is left out is even. `dp=2` are two equal
        replicas; `dp=3:1` two of which the first takes three of four microbatches.
        """
        if text.endswith(".json"):
            return cls.load(Path(text), num_layers)
        given = text_of.pairs(text, KEYS)
        chunks = text_of.number(given.get("chunks", "1"), "chunks")
        tps, shares = text_of.ranks(given)
        layers = text_of.numbers(given["layers"], "layers", "+") if "layers" in given else ()
        pp = text_of.stages(text, given, chunks, tps, shares, layers)
        tps = tps * pp if len(tps) == 1 else tps
        starts = text_of.bounds(layers, pp * chunks, num_layers)
        of_stages = [text_of.shares_of(shares, stage, tps) for stage in range(pp)]
        runs = tuple(Stage(starts[i], starts[i + 1], of_stages[i % pp]) for i in range(pp * chunks))
        for name, known in CHOICES.items():
            if name in given:
                text_of.choice(given[name], name, known)
        plan = cls(
            runs,
            cast(Experts, given.get("experts", "cut")),
            dp=text_of.replicas(given.get("dp", "1")),
            cp=text_of.number(given.get("cp", "1"), "cp"),
            ep=text_of.number(given.get("ep", "1"), "ep"),
            zero=cast(Zero, int(given.get("zero", "0"))),
            schedule=given.get("schedule", CHUNKED[0] if chunks > 1 else "1f1b"),
            depth=text_of.depth(given.get("depth", "1")),
            chunks=chunks,
            sequence=text_of.truth(given.get("sequence", "false"), "sequence"),
            recompute=cast(Recompute, given.get("recompute", "none")),
            offload=cast(Offload, given.get("offload", "none")),
            servers=text_of.number(given.get("servers", "0"), "servers", 0),
        )
        plan.check(num_layers)
        return plan

    @classmethod
    def load(cls, path: Path, num_layers: int) -> Plan:
        """Read the JSON form: `{"stages": [{"start": 0, "stop": 10, "shares": [1, 3]}, …], "experts": "cut"}`."""
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"cannot read the plan {path}: {error.strerror}") from error
        except UNREADABLE as error:
            raise ConfigError(f"{path} is not a plan: {error}", "`tllm plan --json` writes one") from error
        plan.check(num_layers)
        return plan

    def _check_counts(self) -> None:
        for name in ("cp", "ep", "chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"the plan has {name}={getattr(self, name)}", f"give {name} of 1 or more")
        if not self.dp or min(self.dp) < 1 or (len(self.dp) == 1 and self.dp[0] != 1):
            raise PlanError(f"the plan has dp={self.dp}", "give each replica a share of 1 or more, a single one 1")
        if self.servers < 0:
            raise PlanError(f"the plan has servers={self.servers}", "give servers of 0 or more")
        if len(self.stages) % self.chunks:
            raise PlanError(
                f"{len(self.stages)} runs of layers are no whole number of chunks={self.chunks} for each stage",
                "give as many runs as stages times chunks",
            )
        for index, run in enumerate(self.stages):
            if run.shares != self.stages[index % self.pp].shares:
                raise PlanError(
                    f"run {index} has shares {run.shares} and stage {index % self.pp}, which holds it, "
                    f"{self.stages[index % self.pp].shares}",
                    "all chunks of a stage are cut alike",
                )
