"""Faults at every moment: `python benchmarks/faults.py [--seeds 3] [--only NAME]` (as root: it makes hosts).

Each fault comes to a node of three hosts, drawn by the seed, at each moment of serving and of training. Whatever is
seen goes to a history, which a checker holds against the tokens, losses and weights of an undisturbed run. A run with
something wrong is printed, and its history is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from report import raw_of, write

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.families import save_model
from tests.support.faulty import FAULTS, Fault, Faulty
from tests.support.history import History
from tests.support.hosts import Hosts, why_not
from tests.support.moments import MOMENTS, Outcome, Run, golden
from tests.support.train_faults import TRAINING_MOMENTS, TrainRun, undisturbed

Times = list[float]
RELAY = dict(delay_ms=0.01)
FRESH = 24
"""Runs that a cluster is used for before it is started anew."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each fault at each moment of serving")
    parser.add_argument("--train-seeds", type=int, default=2, help="runs of each at each moment of training")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this fault or moment; repeatable")
    parser.add_argument("--again", type=Path, metavar="RESULTS", help="only what is not in these, or went wrong there")
    parser.add_argument("--histories", type=Path, default=Path("/tmp/tllm-faults"), help="of runs that went wrong")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    torch.set_num_threads(1)
    options.histories.mkdir(exist_ok=True)
    start, outcomes = time.monotonic(), earlier(options.again)
    options.done = {(one.fault, one.moment, one.seed) for one in outcomes}
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        try:
            for outcome in chain(serving(Path(root), options), training(Path(root), options)):
                outcomes.append(outcome)
        except KeyboardInterrupt:
            print("interrupted: the table has what was run until now")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    raw = {"runs": [row(outcome) for outcome in outcomes], "minutes": round((time.monotonic() - start) / 60, 1)}
    what = f"{len(outcomes)} faults: {len(outcomes) - len(wrong)} runs as they must be, {len(wrong)} not"
    write("faults", what, table(outcomes), raw, NOTES)
    return len(wrong) > 0


NOTES = """Median and worst seconds after the fault. Named: `/health/progress` answers 503 with the node's name, or the
operator's log names it. Lost: it is given up (not heard for 5 s, and then asked why for up to 1 s). Recovered: every
open stream has its next token; while idle, requests can be served again; in training, the next step is done. A slow
link is no loss, so only the wait for the next token or step is shown. The seed draws node, moment and direction."""


def earlier(results: Path | None) -> list[Outcome]:
    """The runs of a page of results that were as they must be."""
    if results is None:
        return []
    rows = raw_of(results)["runs"]
    return [Outcome(**one, history=History()) for one in rows if not one["wrong"]]


def serving(root: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    """Every fault at every moment of serving, on clusters that are used again as long as they are whole."""
    folder = root / "model"
    save_model("llama", folder)
    truth = golden(folder)
    for network, faults in (({}, [f for f in FAULTS if not f.by_relay]), (RELAY, [f for f in FAULTS if f.by_relay])):
        todo = list(wanted(faults, MOMENTS, options, options.seeds))
        while todo:
            logs = Path(tempfile.mkdtemp(dir=root))
            with Hosts(3, **network) as hosts, contextlib.suppress(Spoilt), Faulty(hosts, folder, logs) as cluster:
                while todo and len(list(logs.iterdir())) < FRESH:
                    outcome = attempt(Run(cluster, truth, *todo.pop(0)))
                    yield shown(outcome, options, logs)
                    if outcome.wrong:
                        raise Spoilt


def training(root: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    """Every fault at every moment of training: a cluster of its own for each."""
    truth = undisturbed(root / "truth")
    for fault, moment, seed in wanted(FAULTS, TRAINING_MOMENTS, options, options.train_seeds):
        folder = Path(tempfile.mkdtemp(dir=root))
        with Hosts(3, **(RELAY if fault.by_relay else {})) as hosts:
            yield shown(attempt(TrainRun(hosts, folder, truth, fault, moment, seed)), options, folder)


class Spoilt(Exception):
    """A cluster in which something went wrong is not used again."""


def attempt(run: Run | TrainRun) -> Outcome:
    """What came of a run, be it that it could not be brought to its end."""
    try:
        return run()
    except (AssertionError, TimeoutError) as error:
        none = dict(tokens=0, named=None, lost=None, recovered=None, ended=None)
        what = dict(fault=run.fault.name, moment=run.moment, seed=run.seed, node=run.node, history=run.history)
        return Outcome(wrong=(f"{type(error).__name__}: {error}"[:2000],), **none, **what)


def wanted(
    faults: Sequence[Fault], moments: Sequence[str], options: argparse.Namespace, seeds: int
) -> Iterator[tuple[Fault, str, int]]:
    names = set(options.only)
    for seed in range(options.first_seed, options.first_seed + seeds):
        for fault in faults:
            for moment in moments:
                is_done = (fault.name, moment, seed) in options.done
                if not is_done and (not names or names & {fault.name, moment}):
                    yield fault, moment, seed


def shown(outcome: Outcome, options: argparse.Namespace, logs: Path) -> Outcome:
    """Print a run as it ends; keep what is known of one that went wrong."""
    times = " ".join(f"{key} {value}" for key, value in row(outcome).items() if key not in ("wrong",))
    print(f"{times} {'; '.join(outcome.wrong) or 'ok'}", flush=True)
    if outcome.wrong:
        name = f"{outcome.fault}-{outcome.moment}-{outcome.seed}".replace("/", "").replace(" ", "-")
        shutil.copytree(logs, options.histories / name, dirs_exist_ok=True)
        outcome.history.write(options.histories / name / "history.jsonl")
    return outcome


def row(outcome: Outcome) -> dict[str, Any]:
    fields = ("fault", "moment", "seed", "node", "tokens", "named", "lost", "recovered", "ended", "wrong")
    return {field: getattr(outcome, field) for field in fields}


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| fault | moment | runs | wrong | named | lost | recovered |", "|---|---|--:|--:|--:|--:|--:|"]
    for fault in FAULTS:
        for moment in (*MOMENTS, *TRAINING_MOMENTS):
            runs = [one for one in outcomes if (one.fault, one.moment) == (fault.name, moment)]
            if runs:
                cells = (spread(runs, lambda one: one.named), spread(runs, lambda one: one.lost))
                cells = (*cells, spread(runs, lambda one: one.recovered))
                wrong = sum(bool(one.wrong) for one in runs)
                lines.append(f"| {fault.name} | {moment} | {len(runs)} | {wrong} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(runs: Sequence[Outcome], of: Callable[[Outcome], float | None]) -> str:
    """Median and worst."""
    found: Times = [value for run in runs if (value := of(run)) is not None]
    return f"{statistics.median(found):.2f}, {max(found):.2f}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
