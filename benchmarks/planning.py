"""The planner marked by reality: `python benchmarks/planning.py [--clusters N] [--goal train serve …]` (as root).

This machine is cut into two to four, unequal in speed and joined by shaped links. On each such cluster the survey
is taken, every plan of a list is predicted from it and then run, for training and for serving; the table shows both,
and what the chosen plan loses against the best of all that were run. On some the memory of each plan is measured.

All of them take two hours: `--skip` and `--clusters` run a part of them, `--onto` adds them to a page that has others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

import msgspec
from report import raw_of, write
from throttled import Machines, Shape

sys.path.append(str(Path(__file__).parents[1]))
from planning_runs import Tried, held, served, trained

from tests.support.hosts import why_not
from tllm.cli.display.tables import table

SPEEDS = ((0.8, 0.8), (0.8, 0.4), (0.9, 0.3), (0.8, 0.2), (0.6, 0.4, 0.4), (0.8, 0.4, 0.4), (0.4, 0.4, 0.4, 0.4))
NETWORKS = (("1gbit", 0.0), ("100mbit", 0.0), ("100mbit", 5.0), ("20mbit", 20.0))
SHAPES = tuple(
    Shape(SPEEDS[(place + turn) % len(SPEEDS)], rate, delay)
    for turn in range(6)
    for place, (rate, delay) in enumerate(NETWORKS)
)
"""24 clusters; the first few differ in everything."""

MEMORY = SHAPES[0], SHAPES[3], SHAPES[18]
"""Those in which memory is measured: two machines near and far, and four."""

HOW = """
A machine of speed 0.4 computes with one thread on a processor of its own, of which something else takes 0.6, two
thousand times a second (benchmarks/slots.py). Of three or four machines some share a processor, and compute in virtual
time (benchmarks/slower): before a rank sends, waits or looks at its clock, it sleeps for as long as a slower processor
would have worked on.
Links are shaped in the kernel, each direction for itself; delays are a relay's.

All plans are run in turn, three times, with a survey before and after each run, since this machine's memory is
9 % faster or slower from one half second to the next, 5 % over 4 s, and in some hours 30 % over a minute; once where a
step is predicted to take four seconds or more. The mean of the surveys before and after a run predicts it; the error of
a plan is that of the run in the middle; ± is the half of what runs differ by. (`early` in the raw figures: by the first
survey alone, which also chooses. Plans with two `rounds` are of commits in which surveys came between rounds.) Plans
follow one another on a cluster that stands, each in an epoch of its own, but for memory, where processes are new for
each. A plan that is predicted to take ten times as long as the best is not run."""

Goal = Literal["train", "serve", "memory"]
RUNS = {"train": trained, "serve": served, "memory": held}
UNITS = {"train": ("ms", 1e3), "serve": ("ms", 1e3), "memory": ("MiB", 2.0**-20)}
Found = list[tuple[Shape, Goal, list[Tried]]]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--clusters", type=int, default=len(SHAPES), help="how many of the %(default)s")
    words.add_argument("--skip", type=int, default=0, help="so many of them at the beginning")
    words.add_argument("--onto", type=Path, help="a page of results, of which other clusters are kept")
    words.add_argument("--goal", choices=get_args(Goal), nargs="+", help="only these")
    args = words.parse_args()
    if reason := why_not():
        sys.exit(reason)
    goals: list[Goal] = args.goal or [*get_args(Goal)]
    found, failed = kept(args.onto) if args.onto else Found(), list[str]()
    with tempfile.TemporaryDirectory() as place:
        for number, shape in enumerate(SHAPES[args.skip :][: args.clusters]):
            for goal in (one for one in goals if one != "memory" or shape in MEMORY):
                folder = Path(place) / f"{number}-{goal}"
                folder.mkdir()
                try:
                    with Machines(shape) as machines:
                        tried = list(RUNS[goal](machines, folder))
                except RuntimeError as error:  # of a cluster, with what it said last
                    failed.append(f"- {shape}, {goal}: {str(error).splitlines()[-1]}")
                    print(shape, goal, error, flush=True)
                    continue
                found = in_order([one for one in found if one[:2] != (shape, goal)] + [(shape, goal, tried)])
                print(f"{shape}, {goal}:\n{table(rows(goal, tried))}\n", flush=True)
            save(found, failed)


def kept(page: Path) -> Found:
    """What a page says."""
    names = {f"{shape} {goal}": (shape, goal) for shape in SHAPES for goal in get_args(Goal)}
    found = Found()
    for name, some in raw_of(page).items():
        for one in some:
            one.setdefault("foretold", [one["predicted"]] * len(one["rounds"]))
        found.append((*names[name], msgspec.convert(some, list[Tried])))
    return found


def in_order(found: Found) -> Found:
    """As they stand in the list, whenever they were run."""
    return sorted(found, key=lambda one: (SHAPES.index(one[0]), get_args(Goal).index(one[1])))


def save(found: Found, failed: list[str]) -> None:
    """The page, of all clusters so far."""
    goals = [goal for goal in get_args(Goal) if any(of == goal for _, of, _ in found)]
    commits = ", ".join(dict.fromkeys(one.commit for _, _, tried in found for one in tried))
    ended = ["Ended by an error:", *failed] if failed else []
    notes = "\n".join([*(told(goal, found) for goal in goals), f"- Run at {commits}.", *ended, HOW])
    text = "\n\n".join(f"## {shape}: {goal}\n\n```\n{table(rows(goal, tried))}\n```" for shape, goal, tried in found)
    raw = {f"{shape} {goal}": [one.raw() for one in tried] for shape, goal, tried in found}
    write("planning", "Predicted and measured: every plan on clusters made here", text, raw, notes)


def rows(goal: Goal, tried: list[Tried]) -> list[list[str]]:
    unit, scale = UNITS[goal]
    lines = [["plan", "machines", f"predicted {unit}", f"measured {unit}", "±", "error", ""]]
    for one in sorted(tried, key=lambda one: one.measured):
        numbers = [f"{scale * one.predicted:.1f}", f"{scale * one.measured:.1f}"]
        numbers += ["" if one.spread is None else f"{100 * one.spread:.1f} %", f"{100 * one.error:+.1f} %"]
        lines.append([one.plan, " ".join(map(str, one.devices)), *numbers, "chosen" if one.chosen else ""])
    return lines


def told(goal: Goal, found: Found) -> str:
    """How far predictions of a goal were off, and what the chosen plan lost against the best that was run."""
    some = [tried for _, of, tried in found if of == goal]
    every = [one for tried in some for one in tried]
    errors = sorted((one.error for one in every), key=abs)
    within = sum(abs(error) <= 0.15 for error in errors)
    mean, middle = statistics.fmean(map(abs, errors)), statistics.median(map(abs, errors))
    text = (
        f"- {goal.capitalize()}: {len(errors)} runs on {len(some)} clusters; the prediction was off by "
        f"{100 * mean:.1f} % on an average, {100 * middle:.1f} % in the middle, {100 * abs(errors[-1]):.1f} % at "
        f"worst; {within} runs within 15 %."
    )
    if goal == "memory":
        return text + f" Measured was {100 * min(errors):+.1f} to {100 * max(errors):+.1f} % of what was predicted."
    spread = statistics.fmean(one.spread for one in every if one.spread is not None)
    early = statistics.fmean(abs(one.measured / one.early - 1) for one in every)
    alone = [abs(one.error) for shape, of, tried in found if of == goal and len(shape.speeds) == 2 for one in tried]
    of_alone = (
        f" Of the {len(alone)} runs on machines that have a processor each it was off by "
        f"{100 * statistics.fmean(alone):.1f} % on an average, {100 * max(alone):.1f} % at worst."
        if alone
        else ""
    )
    lost = [next(one for one in tried if one.chosen).measured / min(one.measured for one in tried) for tried in some]
    return text + (
        f" Where there were several, rounds of a plan differ by ±{100 * spread:.1f} %."
        f"{of_alone} By kinds of plan: {by_kind(every)}."
        f" By the first survey alone it was off by {100 * early:.1f} %. The chosen plan took "
        f"{100 * (statistics.fmean(lost) - 1):.1f} % longer than the best that was run, {100 * (max(lost) - 1):.1f} % "
        f"at worst; in {sum(one <= 1.05 for one in lost)} of {len(lost)} clusters at most 5 %."
    )


def by_kind(tried: list[Tried]) -> str:
    """How far predictions were off on an average, for each kind of plan."""
    kinds = dict[str, list[float]]()
    for one in tried:
        kinds.setdefault(kind(one), []).append(100 * abs(one.error))
    return ", ".join(f"{name} {statistics.fmean(kinds[name]):.1f} %" for name in sorted(kinds))


def kind(tried: Tried) -> str:
    """By what a plan shares its work, in the first place."""
    if len(tried.devices) == 1:
        return "one machine"
    if "dp=" in tried.plan:
        return "dp"
    return "tp" if tried.plan.startswith("pp=1,") else "pp"


if __name__ == "__main__":
    main()
