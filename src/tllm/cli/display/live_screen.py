"""The text of `tllm top`: a cluster at this moment, its last minutes as curves, what is in hand, and what happened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tllm.cli.display.curve import curve
from tllm.cli.display.tables import table
from tllm.core.errors import counted
from tllm.core.memory import amount

LATELY = 5
"""Samples over which rates and shares of time are averaged."""
KEPT = 600
"""Samples, of a second each."""
BAR = 10
CURVE_WIDTH, CURVE_HEIGHT = 50, 4
"""Of a curve, in characters; a character is two columns of dots."""
MOST_SEQUENCES, MOST_EVENTS = 8, 8


@dataclass
class LiveHistory:
    """What `/v1/cluster/live` has told so far, in its own words; `latest` is its last reply without what is kept."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    latest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """What to ask for, so that only news comes."""
        after, events_after = (items[-1]["number"] if items else -1 for items in (self.samples, self.events))
        return f"/v1/cluster/live?after={after}&events_after={events_after}"

    def add(self, reply: Mapping[str, Any]) -> bool:
        """Take in a reply. False where the server was started anew: what was kept is forgotten, ask again."""
        is_anew = bool(self.latest) and self.latest["run"] != reply["run"]
        self.latest = {key: value for key, value in reply.items() if key not in ("samples", "events")}
        self.samples = [] if is_anew else [*self.samples, *reply["samples"]][-KEPT:]
        self.events = [] if is_anew else [*self.events, *reply["events"]][-KEPT:]
        return not is_anew

    @property
    def lately(self) -> list[dict[str, Any]]:
        return self.samples[-LATELY:]

    @property
    def lately_seconds(self) -> float:
        return float(sum(sample["seconds"] for sample in self.lately))


def live_screen(status: Mapping[str, Any], history: LiveHistory) -> str:
    """The whole screen. `status` is the reply of `/v1/cluster`."""
    parts = [_heading(status, history), machines_table(status, history), *_curves(status, history), sequences(history)]
    parts += ["\n".join(_event(event) for event in history.events[: -MOST_EVENTS - 1 : -1])]
    return "\n\n".join(part for part in parts if part)


def machines_table(status: Mapping[str, Any], history: LiveHistory) -> str:
    """A row for each node that has a rank: what it holds, and what it did lately; slow and silent ones are named. Those
    that have a role beside the plan come after them."""
    titles = ["node", "layers", "computing", "a step", "predicted", "memory", "sends", "phase"]
    nodes = sorted((node for node in status["nodes"] if node["rank"] is not None), key=lambda node: node["rank"])
    beside = [node for node in status["nodes"] if node.get("role")]
    if not nodes and not beside:
        return ""
    expected = (status.get("predicted") or {}).get("stages", ())
    rows = [titles]
    for node in nodes:
        own = [sample["nodes"].get(node["node"]) for sample in history.lately]
        busy = _mean([sample["busy"] for sample in own if sample]) or 0.0
        step = _mean([sample["step"] for sample in own if sample and sample["step"] is not None])
        rows.append(
            [
                node["node"],
                f"{node['layers'][0]} to {node['layers'][1] - 1}",
                "█" * round(BAR * busy) + "·" * (BAR - round(BAR * busy)) + f" {100 * busy:3.0f} %",
                "" if step is None else f"{1000 * step:.1f} ms",
                f"{1000 * expected[node['stage']]:.1f} ms" if expected else "",
                amount(node["rss_bytes"]),
                f"{amount(_sent(node['rank'], history))}/s",
                _phase(node, history),
            ]
        )
    for node in beside:
        rows.append([node["node"], node["role"], *[""] * 3, amount(node["rss_bytes"]), "", _phase(node, history)])
    return table(rows)


def sequences(history: LiveHistory) -> str:
    """Those in hand, the oldest first."""
    found = history.latest.get("sequences", ())
    if not found:
        return "no sequence in hand"
    rows = [["sequence", "age", "prompt", "tokens", "first token"]]
    rows += [
        [
            one["id"][:8],
            f"{one['age']:.1f} s",
            str(one["prompt_tokens"]),
            str(one["output_tokens"]),
            "not yet" if one["first_token"] is None else f"{one['first_token']:.2f} s",
        ]
        for one in found[:MOST_SEQUENCES]
    ]
    more = len(found) - MOST_SEQUENCES
    return table(rows) + (f"\nand {more} more" if more > 0 else "")


def _heading(status: Mapping[str, Any], history: LiveHistory) -> str:
    state = "ready" if status["ready"] else f"not ready: {status.get('doing', '')}"
    lines = [f"{status.get('model', 'model')}: {state}, plan {status['plan'] or 'none yet'}"]
    lines += [f"{word}: {status[word]}" for word in ("fault", "trouble", "advice") if status.get(word)]
    if history.samples:
        last = history.samples[-1]
        usage = f"{100 * last['kv_usage']:.0f} % of the KV cache is used"
        run = counted(last["running"], "sequence runs", "sequences run")
        lines.append(f"{run}, {counted(last['waiting'], 'waits', 'wait')}; {usage}")
    return "\n".join(lines)


def _curves(status: Mapping[str, Any], history: LiveHistory) -> list[str]:
    """Tokens per second and milliseconds between tokens over the samples, with what was predicted; answers and
    milliseconds to each, where prompts are pooled and nothing is generated."""
    if len(history.samples) < 2:
        return []
    planned = status.get("predicted") or {}
    predicted = planned.get("beside", {}).get("predicted", planned)
    counts = [sample["generation_tokens"] for sample in history.samples]
    between = [sample["inter_token_latency"] for sample in history.samples]
    titles, key = ["tokens per second", "milliseconds between tokens"], "per_token"
    is_pooled = predicted and predicted["per_token"] is None
    pooled = [sample["time_to_answer"] for sample in history.samples]
    if (is_pooled or any(pooled)) and not any(counts):
        counts, between = [latency["count"] if latency else 0 for latency in pooled], pooled
        titles, key = ["answers per second", "milliseconds to an answer"], "first_token"
    rates = [count / sample["seconds"] for count, sample in zip(counts, history.samples, strict=True)]
    waits = [1000 * latency["median"] if latency else float("nan") for latency in between]
    titles[0] += f": {sum(counts[-LATELY:]) / history.lately_seconds:.1f}"
    if predicted and is_pooled == (key == "first_token"):
        titles[0] += f" (predicted {predicted['tokens_per_second']:.1f})"
        titles[1] += f" (predicted {1000 * predicted[key]:.1f})"
    drawn = [(titles[0], rates)] + ([(titles[1], waits)] if any(between) else [])
    width = min(CURVE_WIDTH, len(history.samples) // 2)
    return ["\n".join([title, *curve(values, width, CURVE_HEIGHT)]) for title, values in drawn]


def _phase(node: Mapping[str, Any], history: LiveHistory) -> str:
    if node["reason"]:
        return f"{node['phase']}: {node['reason']}"
    if history.latest.get("waits_for") == node["node"] and history.latest["seconds_since_step"] > 1:
        return f"waited for since {history.latest['seconds_since_step']:.0f} s"
    loading = node["loading"]
    if node["phase"] == "loading" and loading["total"]:
        return f"loading {100 * loading['done'] // loading['total']} %"
    return str(node["phase"])


def _sent(rank: int, history: LiveHistory) -> float:
    """Bytes per second that a rank sent lately, over all its links."""
    sent = sum(
        count for sample in history.lately for link, count in sample["links"].items() if link.startswith(f"{rank}>")
    )
    return sent / history.lately_seconds if history.lately else 0.0


def _event(event: Mapping[str, Any]) -> str:
    mark = {"info": " ", "warning": "!", "error": "✗"}[event["severity"]]
    return f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} {mark} {event['text']}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
