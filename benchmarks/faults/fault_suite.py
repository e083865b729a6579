"""Faults at every moment: `python -m benchmarks.faults.fault_suite [--seeds 3] [--only NAME]` (as root).

A cluster of three nodes in network namespaces serves or trains. In each run one fault strikes one node, which the seed
draws, at one moment. Everything that users and operators see is recorded in a history, and a checker compares it with
the tokens, losses and weights of an undisturbed run. Of a run with something wrong the history is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import markdown
from benchmarks.report.results import Page, raw_of, write
from tests.support.cluster.faulty_cluster import FAULTS, Fault, Faulty
from tests.support.cluster.history import History
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.models.families import save_model
from tests.support.serving.serving_faults import MOMENTS, Outcome, Run, golden
from tests.support.training.training_faults import TRAINING_MOMENTS, TrainRun, undisturbed

Times = list[float]
RELAY_MS = 0.01
"""A delay at which `Hosts` joins its hosts by a relay, through which faults of a link come."""
FRESH = 24
"""How many runs a cluster is used for before a new one is started."""


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
            print("interrupted: the page has what was run until now")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    raw = {"runs": [row(outcome) for outcome in outcomes], "minutes": round((time.monotonic() - start) / 60, 1)}
    write(page(raw), raw)
    return len(wrong) > 0


PURPOSE = """Whether a cluster survives every fault at every moment, and how long users wait: a node is killed, stopped,
cut off, or its link loses packets, becomes slow or far, while the cluster loads, answers a prompt, decodes, idles,
trains or saves. Each run is checked against an undisturbed one: the same tokens, losses and weights, nothing hung,
nothing left behind."""
READING = """{wrong} of {count} runs had something wrong; they took {minutes} minutes. All numbers are seconds after the
fault. `named`: `/health/progress` answers 503 with the node's name, or the operator's log names it. `given up`: the
node is taken for lost, when it has not been heard for 5 s and then does not answer within 1 s. `going on`: every open
stream has its next token; while idle, requests can be served again; in training, the next step is done. A slow or far
link is no loss: only the wait for the next token or step is shown, and there is none while idle. The seed draws node,
moment and direction."""
LIMITS = """- A silent node is given up only after 5 s, so serving and training wait for 6 to 10 s; where a node is lost
  while weights load, loading begins again.
- The machine on which the command runs was not struck: [double faults](double-faults.md) strike it too.
- Three nodes in network namespaces of one machine, a small model; each fault two or three times at each moment."""


def page(raw: dict[str, Any]) -> Page:
    """The page of raw figures: the worst of each fault over all moments, and each moment's median and worst."""
    runs = raw["runs"]
    worst = [["worst of all moments, s", "runs", "wrong", "named", "given up", "going on"]]
    moments = [*MOMENTS, *TRAINING_MOMENTS]
    each = [["going on, s: median (worst)", *moments]]
    for fault in dict.fromkeys(one["fault"] for one in runs):
        some = [one for one in runs if one["fault"] == fault]
        numbers = [len(some), sum(bool(one["wrong"]) for one in some)]
        worst.append([fault, *map(str, numbers), *(most(some, key) for key in ("named", "lost", "recovered"))])
        each.append([fault, *(spread([one for one in some if one["moment"] == moment]) for moment in moments)])
    counts = {"wrong": sum(bool(one["wrong"]) for one in runs), "count": len(runs), "minutes": raw["minutes"]}
    body = f"{markdown.table(worst)}\n\n{markdown.table(each)}"
    return Page(
        "faults", "faults", f"Faults at every moment: {len(runs)} runs", PURPOSE, body, READING.format(**counts), LIMITS
    )


def most(runs: Sequence[dict[str, Any]], key: str) -> str:
    found: Times = [one[key] for one in runs if one[key] is not None]
    return f"{max(found):.2f}" if found else ""


def spread(runs: Sequence[dict[str, Any]]) -> str:
    """Median and worst of the seconds until it went on."""
    found: Times = [one["recovered"] for one in runs if one["recovered"] is not None]
    return f"{statistics.median(found):.2f} ({max(found):.2f})" if found else ""


def earlier(results: Path | None) -> list[Outcome]:
    """The runs of earlier results in which nothing was wrong."""
    if results is None:
        return []
    rows = raw_of(results)["runs"]
    return [Outcome(**one, history=History()) for one in rows if not one["wrong"]]


def serving(root: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    """Every fault at every moment of serving, on clusters that are used again as long as nothing is wrong with them."""
    folder = root / "model"
    save_model("llama", folder)
    truth = golden(folder)
    for delay_ms in (0.0, RELAY_MS):
        faults = [fault for fault in FAULTS if fault.by_relay == bool(delay_ms)]
        todo = list(wanted(faults, MOMENTS, options, options.seeds))
        while todo:
            logs = Path(tempfile.mkdtemp(dir=root))
            with (
                Hosts(3, delay_ms=delay_ms) as hosts,
                contextlib.suppress(Spoilt),
                Faulty(hosts, folder, logs) as cluster,
            ):
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
        with Hosts(3, delay_ms=RELAY_MS if fault.by_relay else 0.0) as hosts:
            yield shown(attempt(TrainRun(hosts, folder, truth, fault, moment, seed)), options, folder)


class Spoilt(Exception):
    """A cluster in which something went wrong is not used again."""


def attempt(run: Run | TrainRun) -> Outcome:
    """The outcome of a run, also of one that could not be completed."""
    try:
        return run()
    except (AssertionError, TimeoutError) as error:
        return Outcome(
            fault=run.fault.name,
            moment=run.moment,
            seed=run.seed,
            node=run.node,
            tokens=0,
            named=None,
            lost=None,
            recovered=None,
            ended=None,
            wrong=(f"{type(error).__name__}: {error}"[:2000],),
            history=run.history,
        )


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
    """Print a run's outcome; keep the logs and the history of one that went wrong."""
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


if __name__ == "__main__":
    sys.exit(main())
