"""The page of `benchmarks.devices.serving`: `python -m benchmarks.devices.serving_report FIGURES.jsonl --commit C`.

Devices are lent for minutes and reports are written elsewhere, so the runs of the engine and of its peer append lines
to a file (`--out`) that this makes a page of.
"""

from __future__ import annotations

from typing import Any

from benchmarks.devices.figures import read_figures, report_parser
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, Provenance, write

PURPOSE = """How much of a GPU's memory rate replies reach, and how fast prompts are read: the engine with random
weights in bfloat16, all sequences at once, greedy. A step of replies reads every weight and the keys and values of its
sequences once; the limit is those bytes over the rate at which a sum over 4 GiB reads, measured in the same run. The
shape "8b" is Llama 3.1's. Beside it `transformers`' `generate` with the same shape, in the same call of the machine."""

MEANING = """- Replies are computed as CUDA graphs. "Layers alone" is a graph played again and again: what is between
  it and the token is the norm, the logits and the choice of a token, which the host waits for, and its own work.
- Prompts: flops are two for each weight and token, and none for attention."""

LIMITS = """The target is 80 % of the memory's limit; with one sequence {one} are reached, with 64 {many}. With one the
recorded layers alone take {layers} where all may take {limit}: most of the rest are eight small kernels a layer, of
about 3 us each. With 64 the {host} beside the layers are the larger part: the logits, the choice of tokens, and the
host, which starts nothing before it knows the last step's tokens. What is said here is of weights in bfloat16. vLLM,
which 64 requests were to be compared with, could not be installed on the machine. One run of each, in one call; a call
half an hour before, at commit a3ac8195, found {before}."""


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--before", required=True, help="what another run found, in words")
    options = parser.parse_args()
    runs = read_figures(options.figures)
    ours = next(run for run in runs if run["by"] == "tllm")
    device = ours["device"].partition(" ")[2]
    command = "python -m benchmarks.devices.serving --tokens 64 --out FIGURES.jsonl"
    made = Provenance(options.date, options.commit, f"{device}, torch {ours['torch']}", command)
    write(page(runs, device, options.before), runs, made)


def page(runs: list[dict[str, Any]], device: str, before: str) -> Page:
    ours = [run for run in runs if run["by"] == "tllm" and not run.get("quantize")]
    one, many = ours[0], ours[-1]
    limits = LIMITS.format(
        one=percent(one["of_limit"]),
        many=percent(many["of_limit"]),
        layers=ms(one["layers_seconds"]),
        limit=ms(one["limit_seconds"]),
        host=ms(many["token_seconds"] - many["layers_seconds"]),
        before=before,
    )
    return Page("devices", "serving", f"Serving on one {device.split()[-1]}", PURPOSE, as_table(runs), MEANING, limits)


def as_table(runs: list[dict[str, Any]]) -> str:
    head = ["sequences", "by", "prompts", "flops", "a token", "tokens/s", "of the limit", "the limit", "layers alone"]
    lines = [head]
    for run in sorted(runs, key=lambda run: run["sequences"]):
        ours = run["by"] == "tllm"
        lines.append(
            [
                f"{run['sequences']} x {run['prompt']}",
                " ".join(filter(None, (run["by"], run.get("quantize")))),
                ms(run["prompt_seconds"]),
                f"{run['prompt_flops'] / 1e12:.0f} Tflop/s" if ours else "",
                ms(run["token_seconds"]),
                f"{run['sequences'] / run['token_seconds']:,.0f}",
                percent(run["of_limit"]) if ours else "",
                ms(run["limit_seconds"]) if ours else "",
                ms(run["layers_seconds"]) if ours else "",
            ]
        )
    return table(lines, left=2)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
