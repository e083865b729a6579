"""Two faults at once, the first machine among the victims: `python -m benchmarks.faults.double_faults` (as root).

Five hosts in network namespaces serve HTTP and know the coordinator's state. Each seed draws one or two faults, the
hosts that they come to, and the moment, while ten streams are open. A new cluster is started for each run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import markdown
from benchmarks.report.results import Page, processor, raw_of, write
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.double_faults.double_run import DoubleOutcome, DoubleRun, Drawn
from tests.support.double_faults.equal_hosts import COUNT, EqualHosts
from tests.support.models.families import save_model
from tests.support.serving.serving_faults import golden

RUNS = 300
TRACEBACK = "Traceback (most recent call last)"
"""In no fault of a machine, a disk or a network may our own code fail; where it does, its log says so."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="(%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--again", type=Path, metavar="RESULTS", help="go on after the runs of these results")
    parser.add_argument("--histories", type=Path, default=Path("/tmp/tllm-double-faults"), help="of runs gone wrong")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    torch.set_num_threads(1)
    start, rows = time.monotonic(), list[dict[str, Any]]()
    raw: dict[str, Any] = {"runs": rows, "minutes": 0.0, "seeds": {}}
    if options.again is not None:
        raw = raw_of(options.again)
        rows = raw["runs"]
    before, done = raw["minutes"], {row["seed"] for row in rows}
    here = raw["seeds"].setdefault(processor().partition(",")[0], [])
    with tempfile.TemporaryDirectory(prefix="double-faults-") as root:
        model = Path(root) / "model"
        save_model("llama", model, num_hidden_layers=COUNT)
        truth = golden(model)
        for seed in range(options.first_seed, options.first_seed + options.runs):
            if seed not in done:
                rows.append(run(Path(root), model, truth, seed, options.histories))
                here.append(seed)
                raw["minutes"] = round(before + (time.monotonic() - start) / 60, 1)
                write(page(raw), raw)
    return any(row["wrong"] for row in rows)


def run(root: Path, model: Path, truth: list[list[int]], seed: int, histories: Path) -> dict[str, Any]:
    """One run's row. Of one with something wrong the history and the logs are kept."""
    drawn, folder = Drawn.of(seed), Path(tempfile.mkdtemp(dir=root))
    history = None
    try:
        with Hosts(COUNT) as hosts, EqualHosts(hosts, model, folder) as cluster:
            one = DoubleRun(cluster, truth, drawn)
            history = one.history
            outcome = one()
    except (AssertionError, TimeoutError) as error:
        why = f"{type(error).__name__}: {error}"[:2000]
        outcome = DoubleOutcome(seed, drawn.names, drawn.strikes_first, None, None, 0, 0, 0, [why])
    for log in sorted(folder.glob("*.log")):
        if TRACEBACK in log.read_text(errors="replace"):
            outcome.wrong.append(f"{log.name} has a traceback")
    row: dict[str, Any] = dict(vars(outcome))
    print(json.dumps(row), flush=True)
    if outcome.wrong:
        kept = histories / f"seed-{seed}"
        kept.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, kept)
        if history is not None:
            history.write(kept / "history.jsonl")
    shutil.rmtree(folder, ignore_errors=True)
    return row


PURPOSE = """Whether a cluster without a special machine survives two faults at once, the first machine's among them,
and how long its users wait. Five hosts serve HTTP and know the coordinator's state (`--replicas-of-coordinator 5`).
Each run draws one or two of: SIGKILL, SIGSTOP, a link that is cut, a partition that heals after one to nine seconds,
a full disk, a clock that is set ten minutes or a day forward or back, or forty days back. Two streams are open at
every host that goes on."""
READING = """{count} runs of the {all} that the command draws, in {minutes} minutes. In {first} of them the first
machine was struck, which ran the command; in {two} there were two faults. {wrong} had something wrong: {hangs} streams
that hung, {tokens} with other tokens, {replies} kept replies that were not the same afterwards. `silence`, of the
newest {silences} runs: how long a stream got no token after the faults. `going on`: when the longest silence of each
stream had ended, after the faults; where no rank is lost, as by a clock or a disk, that is whenever one was slowest.
`answered`: when every host that was not lost had also answered a new request, after the open streams had ended.
`back`, from seed 57 on: when every host that had been cut off or stopped had answered one, after its fault was undone;
the first machine comes back as one of the nodes."""
LIMITS = """- Five hosts in network namespaces of one machine, a small model, while streams are open; serving alone.
- Five hosts share two cores, with whatever else the machine does: seconds are upper bounds.
- The streams of a host that is killed, stopped or cut off break with it and are not counted.
- The runs are of several days and commits, which the log names. Rows that name no processor have those of all.
- A clock is moved for the processes of a host by a library that they load; disks are small file systems in memory."""


def page(raw: dict[str, Any]) -> Page:
    """The page of raw figures: each fault by itself or with others, and all on each processor."""
    runs = raw["runs"]
    kinds = sorted({kind_of(fault) for row in runs for fault in row["faults"]})
    spans = {"silence": "silence", "going on": "recovered", "answered": "answered", "back": "returned"}
    table = [["with", "runs", "wrong", *(f"{name}, s: median (worst)" for name in spans)]]
    groups = [(kind, [row for row in runs if kind in map(kind_of, row["faults"])]) for kind in kinds]
    groups += [("the first machine", [row for row in runs if row["first"]])]
    for name, seeds in raw["seeds"].items():
        groups.append((f"all on {name}", [row for row in runs if row["seed"] in seeds]))
    for name, some in groups:
        wrong = sum(bool(row["wrong"]) for row in some)
        table.append([name, str(len(some)), str(wrong), *(spread(some, key) for key in spans.values())])
    counts = {
        "count": len(runs),
        "all": RUNS,
        "minutes": raw["minutes"],
        "first": sum(row["first"] for row in runs),
        "two": sum(len(row["faults"]) > 1 for row in runs),
        "wrong": sum(bool(row["wrong"]) for row in runs),
        "hangs": sum(row["hangs"] for row in runs),
        "tokens": sum(row["wrong_tokens"] for row in runs),
        "replies": sum(row["lost_replies"] for row in runs),
        "silences": sum(row.get("silence") is not None for row in runs),
    }
    title = f"Two faults at once: {len(runs)} runs"
    return Page("faults", "double-faults", title, PURPOSE, markdown.table(table), READING.format(**counts), LIMITS)


def kind_of(fault: str) -> str:
    return fault.partition(" of host ")[0]


def spread(runs: list[dict[str, Any]], key: str) -> str:
    found = [row[key] for row in runs if row.get(key) is not None]
    return f"{statistics.median(found):.1f} ({max(found):.1f})" if found else ""


if __name__ == "__main__":
    sys.exit(main())
