// What is in hand, what was predicted beside what is measured, and what happened.

import { clock, count, seconds } from "./amounts.js";
import { element, replace, table } from "./dom.js";

const MOST_SEQUENCES = 20;

/** The sequences in hand, the oldest first. */
export function drawSequences(parent, sequences) {
  const rows = sequences.slice(0, MOST_SEQUENCES).map((sequence) => {
    const generating = sequence.first_token === null ? 0 : sequence.age - sequence.first_token;
    const rate = generating > 0 && sequence.output_tokens > 1 ? (sequence.output_tokens - 1) / generating : null;
    return [
      sequence.id.slice(0, 8),
      seconds(sequence.age),
      count(sequence.prompt_tokens),
      count(sequence.output_tokens),
      sequence.first_token === null ? "not yet" : seconds(sequence.first_token),
      rate === null ? "–" : count(rate),
    ];
  });
  const more = sequences.length - rows.length;
  replace(
    parent,
    rows.length
      ? table(["sequence", "age", "prompt", "tokens", "first token", "tokens/s"], rows)
      : element("p", { class: "quiet" }, "None."),
    more > 0 ? element("p", { class: "quiet" }, `and ${more} more`) : null,
  );
}

/** What the present plan is predicted to do; once requests were served, for requests like them, and what was measured. */
export function drawPredicted(parent, predicted) {
  if (!predicted) {
    const words = "Nobody predicted this plan. Without --plan, tllm measures the machines, chooses a plan and predicts it.";
    replace(parent, element("p", { class: "quiet" }, words));
    return;
  }
  const beside = predicted.beside ?? { ...predicted, predicted, measured: {}, requests: 0 };
  const row = (name, words, key) => {
    const expected = beside.predicted[key];
    const measured = beside.measured[key];
    if (measured === undefined) return [name, words(expected), "–", ""];
    const off = 100 * (measured / expected - 1);
    return [name, words(expected), words(measured), `${off >= 0 ? "+" : "−"}${Math.abs(off).toFixed(0)} %`];
  };
  const load = `${beside.concurrency} at once, each of ${count(beside.prompt)} tokens and answered with ${count(beside.reply)}`;
  const explained = beside.requests
    ? `For requests like the mean of the ${count(beside.requests)} that have ended: ${load}.`
    : `For requests as they were expected: ${load}. What is measured stands here once some have ended.`;
  replace(
    parent,
    table(
      ["", "predicted", "measured", ""],
      [
        row("time to first token", seconds, "first_token"),
        row("time between tokens", seconds, "per_token"),
        row("tokens per second", count, "tokens_per_second"),
      ],
    ),
    element("p", { class: "quiet" }, explained),
  );
}

/** Events, the newest first. */
export function drawEvents(parent, events) {
  const rows = events
    .slice()
    .reverse()
    .map((event) => element("li", { class: event.severity }, element("time", {}, clock(event.time)), event.text));
  replace(parent, rows);
}
