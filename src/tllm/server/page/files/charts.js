// Charts, drawn as SVG: one or two lines over samples, and what was predicted as a dashed one. A chart is an object:
// title; words, which makes text of a value; lines, each with a name and value(samples, at), null where there is none;
// predicted(numbers) and more(sample) if it has them; isTight, if its lowest value and not 0 is at its foot.

import { element, replace, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 110;

/** Draw charts of what `history` keeps; `predicted` as `/v1/cluster` has it, or null. `place` makes text of where a
 * sample stands: its time, or its step. */
export function drawCharts(parent, charts, history, predicted, place) {
  if (!history.samples.length) return;
  const numbers = predicted?.beside?.predicted ?? predicted; // of what was asked for, once something was
  const expected = (chart) => (chart.predicted && numbers ? chart.predicted(numbers) : null);
  replace(parent, charts.map((chart) => drawn(chart, history, expected(chart), place)));
}

function drawn(chart, history, predicted, place) {
  const { samples } = history;
  const lines = chart.lines.map((line) => samples.map((_, at) => line.value(samples, at)));
  const values = lines.flat().filter((value) => value !== null);
  const most = Math.max(...values, ...(predicted === null ? [] : [predicted]));
  const foot = chart.isTight ? Math.min(...values) : 0;
  const height = (value) => HEIGHT * (1 - (value - foot) / (most - foot || 1));
  const last = lines[0].findLast((value) => value !== null);
  const now = last === undefined ? "–" : chart.words(last);
  const said = values.length ? range(chart, foot, most) : " nothing yet";
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 20}`, role: "img", preserveAspectRatio: "none" });
  picture.setAttribute("aria-label", `${chart.title} in these minutes: now ${now}${said}`);
  picture.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }));
  history.events.filter((event) => event.severity === "error").forEach((event) => picture.append(...mark(event, samples)));
  if (predicted !== null) picture.append(...paths("predicted", [predicted, predicted], height));
  lines.forEach((values, at) => picture.append(...paths(at ? "second" : "first", values, height)));
  const readout = element("span", { class: "quiet" });
  follow(picture, readout, chart, samples, lines, place);
  return element(
    "div",
    { class: "chart" },
    element("h3", {}, chart.title),
    element("span", { class: "now" }, now),
    element("span", { class: "quiet" }, said, chart.more ? ` · ${chart.more(samples.at(-1))}` : ""),
    picture,
    element("p", { class: "quiet" }, `${place(samples[0])} to ${place(samples.at(-1))}`, ...names(chart, predicted)),
    readout,
  );
}

function range(chart, foot, most) {
  return chart.isTight ? ` between ${chart.words(foot)} and ${chart.words(most)}` : ` of at most ${chart.words(most)}`;
}

function names(chart, predicted) {
  const shown = chart.lines.map((line, at) => [at ? "second" : "first", line.name]);
  if (predicted !== null) shown.push(["predicted", `predicted ${chart.words(predicted)}`]);
  return shown.map(([kind, name]) => element("span", { class: "name" }, element("span", { class: `swatch ${kind}` }), name));
}

/** A line through the values; where there is none (null) it is interrupted. A lone value is a dot, which is wider than
 * the line: many requests are the only one of their second. */
function paths(kind, values, height) {
  const step = WIDTH / Math.max(1, values.length - 1);
  const none = (at) => (values[at] ?? null) === null;
  let [line, dots] = ["", ""];
  values.forEach((value, at) => {
    if (value === null) return;
    const point = `${(at * step).toFixed(1)} ${height(value).toFixed(1)}`;
    if (none(at - 1) && none(at + 1)) dots += `M${point}h0.01`;
    else line += `${none(at - 1) ? "M" : "L"}${point}`;
  });
  return [svg("path", { class: `line ${kind}`, d: line }), svg("path", { class: `line lone ${kind}`, d: dots })];
}

/** An upright line at the time of an event, where the samples reach back to it. */
function mark(event, samples) {
  const at = samples.findIndex((sample) => sample.time >= event.time);
  if (at < 0 || event.time < samples[0].time) return [];
  const x = (at * WIDTH) / Math.max(1, samples.length - 1);
  return [svg("line", { class: "event", x1: x, x2: x, y1: 0, y2: HEIGHT }, svg("title", {}, event.text))];
}

/** Under the pointer: the time and the values there. */
function follow(picture, readout, chart, samples, lines, place) {
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
    readout.textContent = `${place(samples[at])}: ${values.join(", ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}
