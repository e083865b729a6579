"""Who holds what and who computes what: the `Plan`, its numbering of ranks, its checks, and its two written forms.

The short form (`pp=2,tp=2`) is read by `plan_text`; the other form is JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError, PlanError, counted
from tllm.spec.grid.grid_shape import GridShape, TensorMode, grid_shape
from tllm.spec.pipeline_schedule import Depth
from tllm.spec.plan_text import MAX_RANKS, ONE_REPLICA, TRAINING, read_fields

Experts = Literal["cut", "spread"]
Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "layer", "selective"]
Offload = Literal["none", "host", "disk"]


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
    """How one model is laid out over ranks.

    The ranks are numbered replica by replica, inside a replica stage by stage, inside a stage by context-parallel and
    then by tensor-parallel rank; parameter servers come last. Serving uses `stages`, `experts` and `tensor` alone. The
    other fields are for training: they change where work happens and what is kept, and no number of the result.
    """

    stages: tuple[Stage, ...]
    """The runs of layers in the model's order, one for each pipeline stage; with `chunks`, run c * pp + s is chunk c of
    stage s."""
    experts: Experts = "cut"
    """How the experts of a mixture of experts are divided inside a stage: each by its width ("cut"), or whole experts
    to different ranks ("spread"). Either way the layer ends in one sum over the stage."""
    tensor: TensorMode = "1d"
    """How the ranks of a stage divide its weights: along one side of each ("1d"), or both ways, and activations with
    them, as a grid of ranks (`grid_shape`): a square ("2d"), several squares ("2.5d") or a cube ("3d")."""
    dp: tuple[int, ...] = ONE_REPLICA
    """Each replica's share of a step's microbatches (data parallelism)."""
    cp: int = 1
    """Context-parallel ranks that divide the tokens of a microbatch."""
    ep: int = 1
    """Expert parallelism: so many replicas in a row hold different experts and send each other tokens."""
    zero: Zero = 0
    """The ZeRO stage: what the replicas divide of optimizer states (1), gradients (2) and weights (3)."""
    schedule: str = "1f1b"
    """The pipeline schedule, a name of `pipeline_schedule.ORDERS`."""
    depth: Depth = 1
    """How many forward passes each stage runs ahead of the next one (`pipeline_schedule`); one number, or one for each
    hop. 1 is the classic 1F1B."""
    chunks: int = 1
    """Runs of layers that each stage holds (interleaved schedules)."""
    sequence: bool = False
    """Sequence parallelism: outside the cut layers a stage's ranks divide the tokens."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it: nothing, whole layers, or attention's core alone."""
    offload: Offload = "none"
    """Where optimizer states lie between steps."""
    servers: int = 0
    """Further ranks that keep weights and states for the replicas (the parameter-server architecture)."""

    @property
    def pp(self) -> int:
        return len(self.stages) // self.chunks

    @property
    def grid(self) -> GridShape | None:
        """The grid that the ranks of the largest stage form; None where weights are cut one way."""
        return grid_shape(self.tensor, max(stage.tp for stage in self.stages))

    def grid_of(self, stage: int) -> GridShape | None:
        """The grid that the ranks of one stage form; a rank that has its stage to itself forms none."""
        return None if self.stages[stage].tp == 1 else grid_shape(self.tensor, self.stages[stage].tp)

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

    def run_of(self, layer: int) -> int:
        """Which of the runs has a layer."""
        return next(place for place, run in enumerate(self.stages) if layer < run.stop)

    def coordinates(self, rank: int) -> Coordinates:
        """A rank's place on each axis. Raises PlanError for a rank of no replica, as parameter servers are."""
        if not 0 <= rank < self.replicas * self.replica_size:
            raise PlanError(f"rank {rank} is not in a plan of {counted(self.world_size, 'rank')}")
        replica, left = divmod(rank, self.replica_size)
        stage = 0
        while left >= self.cp * self.stages[stage].tp:
            left -= self.cp * self.stages[stage].tp
            stage += 1
        return Coordinates(replica, stage, *divmod(left, self.stages[stage].tp))

    def rank_of(self, at: Coordinates) -> int:
        """The global rank that stands there."""
        first = self.ranks(at.stage).start
        return at.replica * self.replica_size + first + at.cp * self.stages[at.stage].tp + at.tp

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, tp rank) of a global rank."""
        at = self.coordinates(rank)
        return at.stage, at.tp

    def ranks(self, stage: int) -> range:
        """Global ranks of a stage, of the first replica."""
        first = self.cp * sum(s.tp for s in self.stages[:stage])
        return range(first, first + self.cp * self.stages[stage].tp)

    def check(self, num_layers: int) -> None:
        """Raises PlanError unless each of `num_layers` layers is held exactly once and all counts are possible."""
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
                    f"a model of {counted(num_layers, 'layer')} makes at most {counted(num_layers, 'stage')}",
                )
            if not stage.shares or min(stage.shares) < 1:
                raise PlanError(f"stage {index} has shares {stage.shares}", "give each rank a share of 1 or more")
            at = stage.stop
        if at != num_layers:
            raise PlanError(
                f"the plan holds {counted(at, 'layer')} and the model has {num_layers}",
                f"give layers that add up to {num_layers}",
            )
        self._check_counts()
        self._check_grid()

    def _check_counts(self) -> None:
        for name in ("cp", "ep", "chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"the plan has {name}={getattr(self, name)}", f"give {name} of 1 or more")
        if not self.dp or min(self.dp) < 1 or (len(self.dp) == 1 and self.dp[0] != 1):
            raise PlanError(f"the plan has dp={self.dp}", "give each replica a share of 1 or more, a single one 1")
        if self.world_size > MAX_RANKS:
            raise PlanError(
                f"the plan has {self.world_size:,} ranks, and at most {MAX_RANKS:,} are planned", "give fewer"
            )
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

    def _check_grid(self) -> None:
        """Blocks of a grid are even, and its tokens are cut by the grid itself."""
        if self.grid is None:
            return
        for index, stage in enumerate(self.stages):
            self.grid_of(index)
            if len(set(stage.shares)) > 1:
                raise PlanError(
                    f"tensor={self.tensor} and shares={':'.join(map(str, stage.shares))}: blocks of a grid are even",
                    "leave shares out, or tensor",
                )
        for name, is_set, why in (
            ("experts", self.experts != "cut", "experts are not cut both ways"),
            ("ep", self.ep > 1, "experts are not cut both ways"),
            ("cp", self.cp > 1, "a grid divides the tokens itself, by whole documents"),
            ("sequence", self.sequence, "a grid divides the tokens itself"),
            ("zero", self.zero == 3, "a grid's weights are not gathered layer by layer"),
            ("servers", self.servers > 0, "with servers each replica is one rank"),
        ):
            if is_set:
                raise PlanError(
                    f"tensor={self.tensor} and {name}={str(getattr(self, name)).lower()}: {why}",
                    "take zero=1 or zero=2" if name == "zero" else f"leave {name} out, or tensor",
                )

    def check_serving(self) -> None:
        """Raises PlanError where the plan sets a field that only training has."""
        plain = Plan(self.stages, self.experts, self.tensor)
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
        for name in ("experts", "tensor", "cp", "ep", "zero", "schedule", "chunks", "recompute", "offload", "servers"):
            if getattr(self, name) != getattr(plain, name):
                parts.append(f"{name}={getattr(self, name)}")
        return ",".join([*parts, *(["sequence=true"] if self.sequence else [])])

    @classmethod
    def parse(cls, text: str, num_layers: int) -> Plan:
        """Read the short form `pp=2,tp=1+2,layers=10+22,shares=1:3` (`plan_text`), or a JSON file's path.

        Raises PlanError where a value cannot be read, or where the plan does not fit a model of `num_layers` layers.
        """
        if text.endswith(".json"):
            return cls.load(Path(text), num_layers)
        fields = read_fields(text, num_layers)._asdict()
        plan = cls(tuple(Stage(*run) for run in fields.pop("runs")), **fields)
        plan.check(num_layers)
        return plan

    @classmethod
    def load(cls, path: Path, num_layers: int) -> Plan:
        """Read the JSON form: `{"stages": [{"start": 0, "stop": 10, "shares": [1, 3]}, …], "experts": "cut"}`."""
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(
                f"cannot read the plan {path}: {error.strerror}",
                "give a plan such as pp=2,tp=1+2, or a JSON file of one",
            ) from error
        except UNREADABLE as error:
            raise ConfigError(f"{path} is not a plan: {error}", "`tllm plan --json` writes one") from error
        plan.check(num_layers)
        return plan
