// What is in hand, what was predicted beside what is measured, and what happened.

import { bytes, clock, count, counted, percent, seconds } from "./amounts.js";
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
  const row = (name, words, key) => compared(name, words, beside.predicted[key], beside.measured[key]);
  const writes = beside.predicted.per_token !== null; // else answers are one token, or the numbers of a pooled prompt
  const reply = writes ? ` and answered with ${count(beside.reply)}` : "";
  const load = `${beside.concurrency} at once, each of ${counted(beside.prompt, "token")}${reply}`;
  const ended = beside.requests === 1 ? "the one that has ended" : `the mean of the ${count(beside.requests)} that have ended`;
  const explained = beside.requests
    ? `For requests like ${ended}: ${load}.`
    : `For requests as they were expected: ${load}. What is measured stands here once some have ended.`;
  replace(
    parent,
    table(
      ["", "predicted", "measured", ""],
      writes
        ? [
            row("time to first token", seconds, "first_token"),
            row("time between tokens", seconds, "per_token"),
            row("tokens per second", count, "tokens_per_second"),
          ]
        : [row("time to an answer", seconds, "first_token"), row("answers per second", count, "tokens_per_second")],
    ),
    element("p", { class: "quiet" }, explained),
  );
}

/** How many a run trains, of the model's and those of its adapter, where it has one. */
function parameters({ parameters: own, adapter_parameters: added }) {
  return added ? `${count(added)} trained, of ${count(own + added)}` : count(own);
}

/** Where a training run is. */
export function drawRun(parent, training, samples) {
  const last = samples.at(-1)?.record;
  const lately = samples.slice(-20).map((sample) => sample.record.seconds);
  const step = lately.reduce((total, value) => total + value, 0) / lately.length;
  const rows = [
    ["step", last ? `${count(last.step)} of ${count(training.max_steps)}` : `of ${count(training.max_steps)}`],
    ["loss", last ? last.loss.toFixed(4) : "–"],
    ["time left", last ? seconds((training.max_steps - last.step) * step) : "–"],
    ["parameters", parameters(training)],
    ["folder", training.output_dir],
  ];
  if (training.products) rows.push(["products", training.products]);
  replace(parent, table(["", ""], rows));
}

const isTurns = (value) => Array.isArray(value) && value.every((one) => typeof one.role === "string");

/** Messages with a line for each turn, and for each call in it. */
const turns = (messages) =>
  messages
    .flatMap((one) => [
      `${one.name ?? one.role}: ${one.content ?? ""}`,
      ...(one.tool_calls ?? []).map((call) => `→ ${call.function.name}(${JSON.stringify(call.function.arguments)})`),
    ])
    .join("\n");

/** What the model wrote after its last evaluation, below what it was asked, in a section that is shown once it has. */
export function drawCompletions(section, samples) {
  const last = samples.findLast((sample) => sample.completions?.length);
  section.hidden = !last;
  if (!last || section.dataset.time === String(last.time)) return;
  section.dataset.time = last.time;
  section.querySelector("h2").textContent = `Completions of rows held out, after step ${count(last.record.step)}`;
  const text = (value) => (typeof value === "string" ? value : isTurns(value) ? turns(value) : JSON.stringify(value));
  const written = (one) => text(one.completion) + (one.truncated ? " …" : "");
  const isRewarded = last.completions.some((one) => one.reward !== null);
  const beside = isRewarded ? (one) => one.reward.toPrecision(3) : (one) => text(one.reference ?? "");
  replace(
    section.querySelector(".scroll"),
    table(
      ["prompt", "completion", isRewarded ? "reward" : "the row's own"],
      last.completions.map((one) => [text(one.prompt), written(one), beside(one)]),
    ),
  );
}

/** What a step of the present plan is predicted to take, and what it takes. */
export function drawPredictedStep(parent, predicted) {
  if (!predicted) {
    const words = "Nobody predicted this plan. On several machines without --plan, tllm measures them and predicts it.";
    replace(parent, element("p", { class: "quiet" }, words));
    return;
  }
  const { measured = {}, steps = 0, ...beside } = predicted.beside ?? {};
  const expected = beside.predicted ?? predicted;
  const rows = [
    ["time of a step", seconds, "seconds"],
    ...["policy", "sampling", "rewards", "reference", "teacher"].map((role) => [`of which ${role}`, seconds, role]),
    ["tokens per second", count, "tokens_per_second"],
    ["memory of the fullest rank", bytes, "memory"],
    ["pipeline bubble", percent, "bubble"],
  ].filter(([, , key]) => expected[key] !== null && expected[key] !== undefined);
  replace(
    parent,
    table(["", "predicted", "measured", ""], rows.map(([name, words, key]) => compared(name, words, expected[key], measured[key]))),
    element("p", { class: "quiet" }, steps ? `Medians of ${counted(steps, "step")}.` : "What is measured stands here after a few steps."),
  );
}

/** A row of what was predicted and what was measured, if it was. */
function compared(name, words, expected, measured) {
  if (measured === undefined || measured === null) return [name, words(expected), "–", ""];
  const off = 100 * (measured / expected - 1);
  return [name, words(expected), words(measured), expected ? `${off >= 0 ? "+" : "−"}${Math.abs(off).toFixed(0)} %` : ""];
}

/** Events, the newest first. */
export function drawEvents(parent, events) {
  const rows = events
    .slice()
    .reverse()
    .map((event) => element("li", { class: event.severity }, element("time", {}, clock(event.time)), event.text));
  replace(parent, rows);
}
