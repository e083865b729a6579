// Charts over time, drawn as SVG: one or two lines, and what was predicted as a dashed one.

import { clock, count, percent, seconds } from "./amounts.js";
import { element, replace, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 110;
const SMOOTH = 3; // samples of which a rate is the mean

const CHARTS = [
  {
    title: "Tokens per second",
    words: count,
    lines: [
      { name: "generated", value: rateOf("generation_tokens") },
      { name: "of prompts", value: rateOf("prompt_tokens") },
    ],
    predicted: (predicted) => predicted.tokens_per_second,
  },
  {
    title: "Time between tokens",
    words: seconds,
    lines: [
      { name: "median", value: (samples, at) => samples[at].inter_token_latency?.median ?? null },
      { name: "95th percentile", value: (samples, at) => samples[at].inter_token_latency?.p95 ?? null },
    ],
    predicted: (predicted) => predicted.per_token,
  },
  {
    title: "Time to first token",
    words: seconds,
    lines: [
      { name: "median", value: (samples, at) => samples[at].time_to_first_token?.median ?? null },
      { name: "slowest", value: (samples, at) => samples[at].time_to_first_token?.max ?? null },
    ],
    predicted: (predicted) => predicted.first_token,
  },
  {
    title: "Sequences",
    words: count,
    lines: [
      { name: "running", value: (samples, at) => samples[at].running },
      { name: "waiting", value: (samples, at) => samples[at].waiting },
    ],
    more: (sample) => `KV cache ${percent(sample.kv_usage)} in use`,
  },
];

/** Draw all charts of what `history` keeps; `predicted` as `/v1/cluster` has it, or null. */
export function drawCharts(parent, history, predicted) {
  if (!history.samples.length) return;
  const numbers = predicted?.beside?.predicted ?? predicted; // of requests like those that were served, once there are some
  const expected = (chart) => (chart.predicted && numbers ? chart.predicted(numbers) : null);
  replace(parent, CHARTS.map((chart) => drawn(chart, history, expected(chart))));
}

function drawn(chart, history, predicted) {
  const { samples } = history;
  const lines = chart.lines.map((line) => samples.map((_, at) => line.value(samples, at)));
  const top = Math.max(...lines.flat().filter((value) => value !== null), predicted ?? 0) || 1;
  const last = lines[0].findLast((value) => value !== null);
  const now = last === undefined ? "–" : chart.words(last);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 20}`, role: "img", preserveAspectRatio: "none" });
  picture.setAttribute("aria-label", `${chart.title}: now ${now}, at the most ${chart.words(top)} in these minutes`);
  picture.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }));
  history.events.filter((event) => event.severity === "error").forEach((event) => picture.append(...mark(event, samples)));
  if (predicted !== null) picture.append(path("predicted", [predicted, predicted], top));
  lines.forEach((values, at) => picture.append(path(at ? "second" : "first", values, top)));
  const readout = element("span", { class: "quiet" });
  follow(picture, readout, chart, samples, lines);
  return element(
    "div",
    { class: "chart" },
    element("h3", {}, chart.title),
    element("span", { class: "now" }, now),
    element("span", { class: "quiet" }, ` of at most ${chart.words(top)}`, chart.more ? ` · ${chart.more(samples.at(-1))}` : ""),
    picture,
    element("p", { class: "quiet" }, `${clock(samples[0].time)} to ${clock(samples.at(-1).time)}`, ...names(chart, predicted)),
    readout,
  );
}

function names(chart, predicted) {
  const shown = chart.lines.map((line, at) => [at ? "second" : "first", line.name]);
  if (predicted !== null) shown.push(["predicted", `predicted ${chart.words(predicted)}`]);
  return shown.map(([kind, name]) => element("span", { class: "name" }, element("span", { class: `swatch ${kind}` }), name));
}

/** A line through the values; where there is none (null) it is interrupted, and a lone value is a dot. */
function path(kind, values, top) {
  const step = WIDTH / Math.max(1, values.length - 1);
  let words = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const point = `${(at * step).toFixed(1)} ${(HEIGHT * (1 - value / top)).toFixed(1)}`;
    const begins = at === 0 || values[at - 1] === null;
    words += begins ? `M${point}h0.01` : `L${point}`;
  });
  return svg("path", { class: `line ${kind}`, d: words });
}

/** An upright line at the time of an event, where the samples reach back to it. */
function mark(event, samples) {
  const at = samples.findIndex((sample) => sample.time >= event.time);
  if (at < 0 || event.time < samples[0].time) return [];
  const x = (at * WIDTH) / Math.max(1, samples.length - 1);
  return [svg("line", { class: "event", x1: x, x2: x, y1: 0, y2: HEIGHT }, svg("title", {}, event.text))];
}

/** Under the pointer: the time and the values there. */
function follow(picture, readout, chart, samples, lines) {
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  picture.append(cursor);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const at = Math.round(part * (samples.length - 1));
    cursor.setAttribute("x1", part * WIDTH);
    cursor.setAttribute("x2", part * WIDTH);
    cursor.setAttribute("visibility", "visible");
    const values = chart.lines.map((line, which) => {
      const value = lines[which][at];
      return `${line.name} ${value === null ? "–" : chart.words(value)}`;
    });
    readout.textContent = `${clock(samples[at].time)}: ${values.join(", ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}

/** Tokens of a few samples by their seconds. */
function rateOf(name) {
  return (samples, at) => {
    const some = samples.slice(Math.max(0, at - SMOOTH + 1), at + 1);
    const time = some.reduce((total, sample) => total + sample.seconds, 0);
    return some.reduce((total, sample) => total + sample[name], 0) / time;
  };
}
