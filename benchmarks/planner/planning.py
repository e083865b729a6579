"""Predicted and measured seconds of every plan on emulated clusters: `python -m benchmarks.planner.planning` (as root).

This machine emulates clusters of two to four machines, unequal in speed and joined by shaped links. On each cluster the
machines and links are measured (a survey), the seconds of every plan of a list are predicted from it, and every plan is
run, for training and for serving. The page says how far predictions were off and how much longer the chosen plan took
than the best that was run. On three clusters the memory of each plan is measured, too.

All clusters take two hours: `--skip` and `--clusters` run some of them, and `--onto` adds them to earlier results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from benchmarks.emulation.emulated_machines import ClusterShape, EmulatedMachines
from benchmarks.planner.plan_runs import Tried, held, served, trained
from benchmarks.report import markdown
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, raw_of, write
from tests.support.cluster.hosts import why_not
from tllm.cli.display.tables import table

SPEEDS = ((0.8, 0.8), (0.8, 0.4), (0.9, 0.3), (0.8, 0.2), (0.6, 0.4, 0.4), (0.8, 0.4, 0.4), (0.4, 0.4, 0.4, 0.4))
NETWORKS = (("1gbit", 0.0), ("100mbit", 0.0), ("100mbit", 5.0), ("20mbit", 20.0))
SHAPES = tuple(
    ClusterShape(SPEEDS[(place + turn) % len(SPEEDS)], rate, delay)
    for turn in range(6)
    for place, (rate, delay) in enumerate(NETWORKS)
)
"""24 clusters; the first few differ in everything."""

MEMORY = SHAPES[0], SHAPES[3], SHAPES[18]
"""The clusters on which memory is measured: two machines with a fast and a slow link, and four machines."""

Goal = Literal["train", "serve", "memory"]
RUNS = {"train": trained, "serve": served, "memory": held}
UNITS = {"train": ("ms", 1e3), "serve": ("ms", 1e3), "memory": ("MiB", 2.0**-20)}
Found = list[tuple[ClusterShape, Goal, list[Tried]]]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--clusters", type=int, default=len(SHAPES), help="how many of the %(default)s")
    words.add_argument("--skip", type=int, default=0, help="how many clusters at the beginning to leave out")
    words.add_argument("--onto", type=Path, help="earlier results (page or JSON), of which other clusters are kept")
    words.add_argument("--goal", choices=get_args(Goal), nargs="+", help="only these")
    args = words.parse_args()
    if reason := why_not():
        sys.exit(reason)
    goals: list[Goal] = args.goal or [*get_args(Goal)]
    found, failed = kept(raw_of(args.onto)) if args.onto else Found(), list[str]()
    with tempfile.TemporaryDirectory() as place:
        for number, shape in enumerate(SHAPES[args.skip :][: args.clusters]):
            for goal in (one for one in goals if one != "memory" or shape in MEMORY):
                folder = Path(place) / f"{number}-{goal}"
                folder.mkdir()
                try:
                    with EmulatedMachines(shape) as machines:
                        tried = list(RUNS[goal](machines, folder))
                except RuntimeError as error:  # the cluster ended; the error is the end of its log
                    failed.append(f"- {shape}, {goal}: {str(error).splitlines()[-1]}")
                    print(shape, goal, error, flush=True)
                    continue
                found = in_order([one for one in found if one[:2] != (shape, goal)] + [(shape, goal, tried)])
                print(f"{shape}, {goal}:\n{table(rows(goal, tried))}\n", flush=True)
            save(found, failed)


def kept(raw: dict[str, Any]) -> Found:
    """The plans of earlier results."""
    names = {f"{shape} {goal}": (shape, goal) for shape in SHAPES for goal in get_args(Goal)}
    found = Found()
    for name, some in raw.items():
        for one in some:
            one.setdefault("foretold", [one["predicted"]] * len(one["rounds"]))
        found.append((*names[name], msgspec.convert(some, list[Tried])))
    return found


def in_order(found: Found) -> Found:
    """In the order of `SHAPES`, whenever they were run."""
    return sorted(found, key=lambda one: (SHAPES.index(one[0]), get_args(Goal).index(one[1])))


def save(found: Found, failed: list[str]) -> None:
    """Write the page of all clusters so far."""
    raw = {f"{shape} {goal}": [one.raw() for one in tried] for shape, goal, tried in found}
    write(page(found, failed=failed), raw)


PURPOSE = """How far the planner's predictions are off, and whether it chooses the best plan. On each emulated cluster
every plan of a list is run and compared with its prediction: seconds of a training step of a model of about 5 million
parameters, seconds of a token of a model of 30 million, bytes of the rank that takes the most."""
READING = """`error` is how far the measured time of a plan was off its prediction, as a mean over the plans of a
cluster and at worst. `chosen` is how much longer the chosen plan took than the best that was run. Speeds are parts of a
processor that each machine has; then the rate of the links, and their delay one way."""
HOW = """All plans run in turn, up to three times, with a survey before and after each run; the mean of the two predicts
the run, since this machine's memory is 9 % faster or slower from one half second to the next, and in some hours 30 %
over a minute. A plan's error is that of its middle run. Steps that are predicted to take long run once, and a plan that
is predicted to take ten times as long as the best is not run. The raw figures say of each plan what was predicted
(`early`: by the first survey alone, which also chooses) and measured, and at which commit."""
LIMITS = """- Clusters are emulated (benchmarks/emulation): a machine that has a processor of its own is slowed by a
  program that takes part of it; machines that share one compute in virtual time. No cluster of real machines was
  measured.
- Small models, so that a token takes 15 ms on one machine: small operations and the host's noise weigh much."""
TITLE = "Planner: predicted and measured times on emulated clusters"


def page(found: Found, kind: str = "planning", title: str = TITLE, failed: Sequence[str] = ()) -> Page:
    """The page: a line for each cluster, the sums of each goal, and the plans whose prediction was furthest off."""
    goals = [goal for goal in get_args(Goal) if any(of == goal for _, of, _ in found)]
    of_goals = {(shape, goal): tried for shape, goal, tried in found}
    units = [goal for goal in goals if goal != "memory"]
    lines = [["cluster", *(f"{goal}, {what}" for goal in units for what in ("plans", "error", "worst", "chosen"))]]
    for shape in dict.fromkeys(shape for shape, goal, _ in found if goal in units):
        lines.append([str(shape), *(cell for goal in units for cell in cells(of_goals.get((shape, goal))))])
    commits = ", ".join(dict.fromkeys(one.commit for _, _, tried in found for one in tried))
    meaning = [READING, "", *(told(goal, found) for goal in goals), f"- Run at {commits}.", "", HOW]
    ended = ["- Ended by an error:", *(f"  {line}" for line in failed)] if failed else []
    limits = "\n".join([LIMITS, *ended, f"- Furthest off: {furthest(found)}."])
    return Page("planner", kind, title, PURPOSE, markdown.table(lines), "\n".join(meaning), limits)


def cells(tried: list[Tried] | None) -> list[str]:
    """What a page's table says of a cluster and a goal."""
    if tried is None:
        return [""] * 4
    errors = [abs(one.error) for one in tried]
    return [str(len(tried)), percent(statistics.fmean(errors)), percent(max(errors)), percent(loss(tried))]


def loss(tried: list[Tried]) -> float:
    """How much longer the chosen plan took than the best that was run."""
    return next(one for one in tried if one.chosen).measured / min(one.measured for one in tried) - 1


def furthest(found: Found, count: int = 5) -> str:
    """The plans whose predictions were furthest off."""
    every = [(one, shape, goal) for shape, goal, tried in found for one in tried]
    worst = sorted(every, key=lambda one: -abs(one[0].error))[:count]
    return "; ".join(f"{one.plan} to {goal} on {shape} {percent(one.error, sign=True)}" for one, shape, goal in worst)


def rows(goal: Goal, tried: list[Tried]) -> list[list[str]]:
    """Every plan of a cluster, the fastest first, as it is printed when it has been run."""
    unit, scale = UNITS[goal]
    lines = [["plan", "machines", f"predicted {unit}", f"measured {unit}", "±", "error", ""]]
    for one in sorted(tried, key=lambda one: one.measured):
        numbers = [f"{scale * one.predicted:.1f}", f"{scale * one.measured:.1f}"]
        numbers += ["" if one.spread is None else f"{100 * one.spread:.1f} %", f"{100 * one.error:+.1f} %"]
        lines.append([one.plan, " ".join(map(str, one.devices)), *numbers, "chosen" if one.chosen else ""])
    return lines


def told(goal: Goal, found: Found) -> str:
    """How far predictions of a goal were off, and how much longer the chosen plans took than the best that were run."""
    some = [tried for _, of, tried in found if of == goal]
    every = [one for tried in some for one in tried]
    errors = sorted((one.error for one in every), key=abs)
    sizes = [*map(abs, errors)]
    within = sum(size <= 0.15 for size in sizes)
    mean, middle, worst = map(percent, (statistics.fmean(sizes), statistics.median(sizes), sizes[-1]))
    text = (
        f"- {goal.capitalize()}: {len(errors)} plans on {len(some)} clusters, off by {mean} on average, {middle} in "
        f"the median, {worst} at worst; {within} within 15 %."
    )
    if goal == "memory":
        least, most = (percent(one, sign=True) for one in (min(errors), max(errors)))
        return f"{text} Measured beside predicted: {least} to {most}."
    spread = statistics.fmean(one.spread for one in every if one.spread is not None)
    early = statistics.fmean(abs(one.measured / one.early - 1) for one in every)
    alone = [abs(one.error) for shape, of, tried in found if of == goal and len(shape.speeds) == 2 for one in tried]
    if alone:
        mean, worst = percent(statistics.fmean(alone)), percent(max(alone))
        text += f" The {len(alone)} on machines with a processor each: {mean} on average, {worst} at worst."
    lost = [loss(tried) for tried in some]
    longer, longest = percent(statistics.fmean(lost)), percent(max(lost))
    return text + (
        f" By kinds of plan: {by_kind(every)}. By the first survey alone: {percent(early)}. Runs of a plan differ by "
        f"±{percent(spread)}. The chosen plan took {longer} longer than the best that was run, {longest} at worst; in "
        f"{sum(one <= 0.05 for one in lost)} of {len(lost)} clusters at most 5 %."
    )


def by_kind(tried: list[Tried]) -> str:
    """How far predictions were off on average, for each kind of plan."""
    kinds = dict[str, list[float]]()
    for one in tried:
        kinds.setdefault(kind(one), []).append(100 * abs(one.error))
    return ", ".join(f"{name} {statistics.fmean(kinds[name]):.1f} %" for name in sorted(kinds))


def kind(tried: Tried) -> str:
    """How a plan shares its work in the first place."""
    if len(tried.devices) == 1:
        return "one machine"
    if "dp=" in tried.plan:
        return "dp"
    return "tp" if tried.plan.startswith("pp=1,") else "pp"


if __name__ == "__main__":
    main()
