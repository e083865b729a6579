"""Who holds what: the `Plan` and its two written forms, the short one (`pp=2,tp=2`) and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tllm.ground.decode import UNREADABLE
from tllm.ground.errors import ConfigError, PlanError
from tllm.ground.words import nearest

Experts = Literal["cut", "spread"]
KEYS = ("pp", "tp", "layers", "shares", "experts")


class Stage(msgspec.Struct, frozen=True):
    """Layers [start, stop) held by `len(shares)` tensor-parallel ranks, in proportion to their `shares`."""

    start: int
    stop: int
    shares: tuple[int, ...] = (1,)

    @property
    def tp(self) -> int:
        return len(self.shares)


class Plan(msgspec.Struct, frozen=True):
    """One whole model over ranks numbered stage by stage: stage 0 holds ranks 0 … tp_0 - 1, stage 1 the next tp_1, …

    `experts` says how a mixture-of-experts layer is cut inside a stage: each expert by its width ("cut"),
    or whole experts to different ranks ("spread"). Either way the layer ends in the same one sum.
    """

    stages: tuple[Stage, ...]
    experts: Experts = "cut"

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def world_size(self) -> int:
        return sum(stage.tp for stage in self.stages)

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, tp rank) of a global rank."""
        for index in range(self.pp):
            ranks = self.ranks(index)
            if rank in ranks:
                return index, rank - ranks.start
        raise PlanError(f"rank {rank} is not in a plan of {self.world_size} ranks")

    def ranks(self, stage: int) -> range:
        """Global ranks of a stage."""
        first = sum(s.tp for s in self.stages[:stage])
        return range(first, first + self.stages[stage].tp)

    def check(self, num_layers: int) -> None:
        """Refuse a plan that does not hold each of `num_layers` layers exactly once."""
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

    def __str__(self) -> str:
        """The short form; `Plan.parse` reads it back."""
        parts = [f"pp={self.pp}", "tp=" + "+".join(str(s.tp) for s in self.stages)]
        parts.append("layers=" + "+".join(str(s.stop - s.start) for s in self.stages))
        if any(len(set(s.shares)) > 1 for s in self.stages):
            parts.append("shares=" + "+".join(":".join(map(str, s.shares)) for s in self.stages))
        if self.experts != "cut":
            parts.append(f"experts={self.experts}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str, num_layers: int) -> Plan:
        """Read the short form `pp=2,tp=1+2,layers=10+22,shares=1:3`, or a JSON file's path.

        `tp` and `layers` take one number for all stages or one for each, joined by "+". `shares` takes one list for
        every stage with that many ranks, or one for each stage. What is left out is even.
        """
        if text.endswith(".json"):
            return cls.load(Path(text), num_layers)
        given = _pairs(text)
        layers = [_number(n, "layers") for n in given["layers"].split("+")] if "layers" in given else []
        tps = [_number(n, "tp") for n in given.get("tp", "1").split("+")]
        share_lists = [
            [_number(n, "shares") for n in one.split(":")] for one in given.get("shares", "").split("+") if one
        ]
        per_stage = [len(x) for x in (layers, tps, share_lists) if len(x) > 1]
        pp = _number(given["pp"], "pp") if "pp" in given else max(per_stage, default=1)
        if any(n != pp for n in per_stage):
            raise PlanError(
                f"plan {text!r} speaks of {pp} stages and of {next(n for n in per_stage if n != pp)}",
                "give one value for all stages, or one for each, joined by +",
            )
        tps = tps * pp if len(tps) == 1 else tps
        bounds = _bounds(layers, pp, num_layers)
        experts = given.get("experts", "cut")
        if experts not in ("cut", "spread"):
            raise PlanError(f"experts={experts} is neither cut nor spread", "write experts=cut or experts=spread")
        stages = tuple(Stage(bounds[i], bounds[i + 1], _shares(share_lists, i, tps[i], tps)) for i in range(pp))
        plan = cls(stages, "spread" if experts == "spread" else "cut")
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


def _pairs(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if key not in KEYS or not equals or not value:
            raise PlanError(f"plan {text!r}: {part!r} is not understood", nearest(key, KEYS))
        if key in given:
            raise PlanError(f"plan {text!r} gives {key} twice", "give it once")
        given[key] = value
    return given


def _number(text: str, key: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise PlanError(f"{key}={text!r} is not a whole number of 1 or more", f"for example {key}=2")
    return int(text)


def _bounds(layers: list[int], pp: int, num_layers: int) -> list[int]:
    """Where each stage starts, and the end. Left out: as even as can be, the later stages taking what is over."""
    if not layers:
        return [num_layers * i // pp for i in range(pp + 1)]
    counts = layers if len(layers) == pp else layers * pp
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def _shares(lists: list[list[int]], stage: int, tp: int, tps: list[int]) -> tuple[int, ...]:
    if not lists:
        return (1,) * tp
    if len(lists) > 1:
        shares = lists[stage]
        if len(shares) != tp:
            raise PlanError(f"stage {stage} has tp={tp} and {len(shares)} shares", "give one share for each rank")
        return tuple(shares)
    if len(lists[0]) not in tps:
        raise PlanError(
            f"shares {':'.join(map(str, lists[0]))} are for {len(lists[0])} ranks and no stage has so many (tp={tps})",
            "give as many shares as a stage has ranks",
        )
    return tuple(lists[0]) if len(lists[0]) == tp else (1,) * tp
