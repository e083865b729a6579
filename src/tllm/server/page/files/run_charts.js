// The charts of a training run, over its steps.

import { bytes, count, percent, seconds } from "./amounts.js";

const field = (name) => (samples, at) => samples[at].record[name];
const evaluated = (name) => (samples, at) => samples[at].record.eval_metrics?.[name] ?? null;
const OF_TASKS = "lm_eval/"; // what names of scores of lm-evaluation-harness's tasks begin with
const MOST_TASK_CHARTS = 12; // a benchmark of many parts has a score for each

export const RUN_CHARTS = [
  {
    title: "Loss",
    words: (value) => value.toFixed(3),
    lines: [{ name: "of each step, in nats a token", value: field("loss") }],
    isTight: true,
  },
  {
    title: "Held-out loss",
    words: (value) => value.toFixed(3),
    lines: [{ name: "of eval_files", value: field("eval_loss") }],
    isTight: true,
  },
  {
    title: "Held-out reward",
    words: (value) => value.toFixed(3),
    lines: [{ name: "mean over completions of eval_files", value: evaluated("reward") }],
    isTight: true,
  },
  {
    title: "Gradient norm",
    words: (value) => value.toPrecision(3),
    lines: [{ name: "before clipping", value: field("grad_norm") }],
  },
  {
    title: "Time of a step",
    words: seconds,
    lines: [{ name: "of each step", value: field("seconds") }],
    predicted: (predicted) => predicted.seconds,
  },
  {
    title: "Tokens per second",
    words: count,
    lines: [{ name: "of all ranks", value: field("tokens_per_second") }],
    predicted: (predicted) => predicted.tokens_per_second,
  },
  {
    title: "Learning rate",
    words: (value) => value.toExponential(2),
    lines: [{ name: "of each step", value: field("learning_rate") }],
  },
  {
    title: "Pipeline bubble",
    words: percent,
    lines: [{ name: "part of the time that ranks wait", value: field("bubble") }],
    predicted: (predicted) => predicted.bubble ?? null,
  },
  {
    title: "Memory of the fullest rank",
    words: bytes,
    lines: [{ name: "bytes", value: field("memory") }],
    predicted: (predicted) => predicted.memory,
  },
];

/** Those charts that the run has numbers for. */
export function runCharts(samples) {
  const shown = RUN_CHARTS.filter((chart) => samples.some((_, at) => chart.lines[0].value(samples, at) !== null));
  return [...shown, ...taskCharts(samples)];
}

/** One for each score of the tasks that evaluations run. */
function taskCharts(samples) {
  const told = samples.flatMap((sample) => Object.keys(sample.record.eval_metrics ?? {}));
  const names = [...new Set(told)].filter((name) => name.startsWith(OF_TASKS)).slice(0, MOST_TASK_CHARTS);
  return names.map((name) => ({
    title: name.slice(OF_TASKS.length),
    words: (value) => value.toFixed(3),
    lines: [{ name: "of lm_eval_tasks", value: evaluated(name) }],
    isTight: true,
  }));
}

/** Where a sample stands. */
export const stepOf = (sample) => `step ${sample.record.step}`;
