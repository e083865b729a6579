"""Pipeline schedules as pure lists of what each stage executes; the trainer plays them, the planner times them.

`play` finds deadlocks. That a schedule is complete, and in order on every link, is proved by tests
(`tests/support/training/schedule_check.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tllm.core.errors import PlanError, counted, nearest

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
Depth = int | tuple[int, ...]
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


class Op(NamedTuple):
    """One piece of work of a stage. `backward` is the whole; `backward_input` and `backward_weight` are its halves."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """Short, for pictures and errors: F3, or F3.1 on chunk 1."""
        return f"{LETTERS[self.kind]}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class StageChunk(NamedTuple):
    """One run of layers: chunk `chunk` of stage `stage`."""

    stage: int
    chunk: int


class StageTransfer(NamedTuple):
    """One tensor on its way: an activation (`forward`) or its gradient (`backward`). Both ends derive the same one.

    Source and target may be one stage (a single stage with chunks): then nothing leaves the rank.
    """

    kind: Literal["forward", "backward"]
    microbatch: int
    source: StageChunk
    target: StageChunk


@dataclass(frozen=True)
class Schedule:
    """`lists[stage]` is what it executes, in order. Chunk c of stage s is run c * stages + s of the model's layers.

    Runs before `learns_from` hold nothing that is learned: no gradient goes to them, and their backward ops do nothing.
    """

    stages: int
    microbatches: int
    chunks: int
    lists: tuple[tuple[Op, ...], ...]
    learns_from: int = 0

    def places(self) -> list[StageChunk]:
        """Every place, in the order of the model's layers."""
        return [StageChunk(stage, chunk) for chunk in range(self.chunks) for stage in range(self.stages)]

    def receives(self, stage: int, op: Op) -> StageTransfer | None:
        """What an op needs from elsewhere; None at the model's ends and for a weight gradient."""
        here = StageChunk(stage, op.chunk)
        if op.kind == "backward_weight":
            return None
        if op.kind == "forward":
            below = self._below(here)
            return StageTransfer("forward", op.microbatch, below, here) if below else None
        above = self._above(here) if self.run(here) >= self.learns_from else None
        return StageTransfer("backward", op.microbatch, above, here) if above else None

    def sends(self, stage: int, op: Op) -> StageTransfer | None:
        """What an op yields for elsewhere; None at the model's ends and for a weight gradient."""
        here = StageChunk(stage, op.chunk)
        if op.kind == "backward_weight":
            return None
        if op.kind == "forward":
            above = self._above(here)
            return StageTransfer("forward", op.microbatch, here, above) if above else None
        below = self._below(here) if self.wants_input_gradient(here) else None
        return StageTransfer("backward", op.microbatch, here, below) if below else None

    def run(self, here: StageChunk) -> int:
        """Which of the model's runs of layers a place has."""
        return here.chunk * self.stages + here.stage

    def wants_input_gradient(self, here: StageChunk) -> bool:
        """Whether something below a place is learned."""
        return self.run(here) > self.learns_from

    def peak_live(self, stage: int) -> int:
        """Most activations that a stage holds at once, each of one microbatch on one chunk, until its last gradient."""
        live = peak = 0
        for op in self.lists[stage]:
            if op.kind == "forward":
                live += 1
                peak = max(peak, live)
            elif op.kind != "backward_input":
                live -= 1
        return peak

    def _below(self, here: StageChunk) -> StageChunk | None:
        if here.stage:
            return StageChunk(here.stage - 1, here.chunk)
        return StageChunk(self.stages - 1, here.chunk - 1) if here.chunk else None

    def _above(self, here: StageChunk) -> StageChunk | None:
        if here.stage + 1 < self.stages:
            return StageChunk(here.stage + 1, here.chunk)
        return StageChunk(0, here.chunk + 1) if here.chunk + 1 < self.chunks else None


# In every order the backwards of one chunk go from microbatch 0 up, so gradients are summed alike under all of them.


def gpipe(stage: int, stages: int, microbatches: int) -> list[Op]:
    """All forwards, then all backwards (Huang et al., 2019). Holds every microbatch."""
    return [Op("forward", i) for i in range(microbatches)] + [Op("backward", i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int, depth: Depth = 1) -> list[Op]:
    """Warm up, then one forward and one backward in turn (PipeDream-Flush; Narayanan et al., 2021).

    `depth` is how many forwards a stage runs ahead of the next one; the classic 1 holds `stages - stage` activations.
    A hop of h seconds is hidden by a depth of 1 + 2h / (forward + backward), rounded up. A tuple gives one depth for
    each hop, that from stage 0 to 1 first.
    """
    ahead = min(microbatches, warm_up(stage, stages, depth))
    ops = [Op("forward", i) for i in range(ahead)]
    for i in range(microbatches):
        if ahead + i < microbatches:
            ops.append(Op("forward", ahead + i))
        ops.append(Op("backward", i))
    return ops


def zero_bubble(stage: int, stages: int, microbatches: int, depth: Depth = 1) -> list[Op]:
    """1F1B whose weight gradients wait until the stage would idle (ZB-H1; Qi et al., 2023). `depth` 2 makes ZB-H2.

    A stage puts them off by as many microbatches as it warms up less than stage 0, so each holds as much as stage 0.
    """
    ahead = min(microbatches, warm_up(stage, stages, depth))
    behind = min(microbatches, warm_up(0, stages, depth)) - ahead
    ops = [Op("forward", i) for i in range(ahead)]
    for i in range(microbatches):
        if ahead + i < microbatches:
            ops.append(Op("forward", ahead + i))
        ops.append(Op("backward_input", i))
        if i >= behind:
            ops.append(Op("backward_weight", i - behind))
    return ops + [Op("backward_weight", i) for i in range(max(0, microbatches - behind), microbatches)]


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list[Op]:
    """1F1B over `chunks` runs of layers per stage (Narayanan et al., 2021, section 2.2), in Megatron-LM's order.

    Microbatches pass each chunk in groups of `stages`; where that does not divide, in groups a little larger.
    """
    sizes = _groups(stages, microbatches)
    forwards: list[Op] = []
    backwards: list[Op] = []
    start = 0
    for size in sizes:
        for chunk in range(chunks):
            forwards += [Op("forward", i, chunk) for i in range(start, start + size)]
            backwards += [Op("backward", i, chunks - 1 - chunk) for i in range(start, start + size)]
        start += size
    ahead = min(len(forwards), 2 * (stages - 1 - stage) + (chunks - 1) * max(sizes))
    ops = forwards[:ahead]
    for i, backward in enumerate(backwards):
        ops += [*forwards[ahead + i : ahead + i + 1], backward]
    return ops


def warm_up(stage: int, stages: int, depth: Depth) -> int:
    """Forwards that a stage runs before its first pair of forward and backward."""
    if isinstance(depth, int):
        return depth * (stages - 1 - stage)
    return sum(depth[stage:])


def _groups(stages: int, microbatches: int) -> list[int]:
    """Sizes, larger first, of as many groups as hold `stages` or more each; a smaller one would starve the pipeline."""
    count = max(1, microbatches // stages)
    size, over = divmod(microbatches, count)
    return [size + 1] * over + [size] * (count - over)


ORDERS: dict[str, Callable[..., list[Op]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "interleaved": interleaved,
}
"""By the name a plan gives. Arguments: stage, stages, microbatches, then `depth` or `chunks` where DEEP or CHUNKED."""

DEEP = ("1f1b", "zero_bubble")
CHUNKED = ("interleaved",)


def build(
    name: str, stages: int, microbatches: int, depth: Depth = 1, chunks: int = 1, learns_from: int = 0
) -> Schedule:
    """The lists of all stages under the order called `name`. PlanError for numbers that it cannot take."""
    if name not in ORDERS:
        raise PlanError(f"schedule {name!r} is not known", nearest(name, ORDERS))
    for what, count in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if count < 1:
            raise PlanError(f"a schedule over {count} {what}", f"give {what} of 1 or more")
    _check_depth(name, stages, depth)
    if (chunks > 1) != (name in CHUNKED):
        hint = "give 2 or more, or take 1f1b" if name in CHUNKED else f"only {', '.join(CHUNKED)} takes chunks"
        raise PlanError(f"schedule {name} with {counted(chunks, 'chunk')} on each stage", hint)
    options = {"depth": depth} if name in DEEP else {"chunks": chunks} if name in CHUNKED else {}
    lists = tuple(tuple(ORDERS[name](stage, stages, microbatches, **options)) for stage in range(stages))
    return Schedule(stages, microbatches, chunks, lists, learns_from)


def forward_only(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The forward passes of an evaluation: microbatches pass each chunk in groups, as under `interleaved`."""
    ops: list[Op] = []
    start = 0
    for size in _groups(stages, microbatches):
        ops += [Op("forward", i, chunk) for chunk in range(chunks) for i in range(start, start + size)]
        start += size
    return Schedule(stages, microbatches, chunks, (tuple(ops),) * stages)


def _check_depth(name: str, stages: int, depth: Depth) -> None:
    if depth != 1 and name not in DEEP:
        raise PlanError(f"schedule {name} has no warm-up depth, and {depth} is given", f"only {', '.join(DEEP)} have")
    depths = (depth,) if isinstance(depth, int) else depth
    if not isinstance(depth, int) and len(depth) != stages - 1:
        raise PlanError(
            f"{len(depth)} warm-up depths for the {counted(stages - 1, 'hop')} between {counted(stages, 'stage')}",
            "give one number for all, or one for each hop",
        )
    if min(depths, default=1) < 0:
        raise PlanError(f"warm-up depth {min(depths)} is below 0", "1 is the classic one; more hides slow hops")


def play(schedule: Schedule) -> Iterator[tuple[int, Op]]:
    """Every (stage, op) in an order in which each finds its input there. PlanError when all stages wait.

    Stages run until they wait and are woken by the tensor they wait for, so the work is linear in the number of ops.
    """
    at = [0] * schedule.stages
    arrived: set[StageTransfer] = set()
    waiting: dict[StageTransfer, int] = {}
    runnable = deque(range(schedule.stages))
    while runnable:
        stage = runnable.popleft()
        ops = schedule.lists[stage]
        while at[stage] < len(ops):
            op = ops[at[stage]]
            needed = schedule.receives(stage, op)
            if needed is not None and needed not in arrived:
                waiting[needed] = stage
                break
            arrived.discard(needed)
            yield stage, op
            at[stage] += 1
            sent = schedule.sends(stage, op)
            if sent is not None:
                arrived.add(sent)
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
    if waiting:
        raise _deadlock(schedule, waiting, at)


def _deadlock(schedule: Schedule, waiting: dict[StageTransfer, int], at: list[int]) -> PlanError:
    hop, stage = min(waiting.items(), key=lambda item: item[1])
    return PlanError(
        f"the schedule deadlocks with {len(waiting)} of {schedule.stages} stages waiting: stage {stage} at "
        f"{schedule.lists[stage][at[stage]]} (op {at[stage]}) for stage {hop.source.stage}, "
        f"which stands at op {at[hop.source.stage]} of {len(schedule.lists[hop.source.stage])}"
    )
