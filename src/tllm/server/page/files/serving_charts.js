// The charts of a server, over the last ten minutes.

import { count, percent, seconds } from "./amounts.js";

const SMOOTH = 3; // samples of which a rate is the mean

const SEQUENCES = {
  title: "Sequences",
  words: count,
  lines: [
    { name: "running", value: (samples, at) => samples[at].running },
    { name: "waiting", value: (samples, at) => samples[at].waiting },
  ],
  more: (sample) => `KV cache ${percent(sample.kv_usage)} in use`,
};

const CHARTS_OF_REPLIES = [
  {
    title: "Tokens per second",
    words: count,
    lines: [
      { name: "generated", value: rateOf((sample) => sample.generation_tokens) },
      { name: "of prompts", value: rateOf((sample) => sample.prompt_tokens) },
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
  SEQUENCES,
];

/** Of prompts that are pooled, where nothing is generated. */
const CHARTS_OF_ANSWERS = [
  {
    title: "Answers per second",
    words: count,
    lines: [{ name: "answers", value: rateOf((sample) => sample.time_to_answer?.count ?? 0) }],
    predicted: ofAnswers("tokens_per_second"),
  },
  {
    title: "Time to an answer",
    words: seconds,
    lines: [
      { name: "median", value: (samples, at) => samples[at].time_to_answer?.median ?? null },
      { name: "95th percentile", value: (samples, at) => samples[at].time_to_answer?.p95 ?? null },
    ],
    predicted: ofAnswers("first_token"),
  },
  {
    title: "Tokens of prompts per second",
    words: count,
    lines: [{ name: "of prompts", value: rateOf((sample) => sample.prompt_tokens) }],
  },
  SEQUENCES,
];

/** Those of replies, unless in all samples prompts alone were answered, or nothing yet that is predicted to be. */
export function servingCharts(samples, predicted) {
  const isPooled = samples.some((sample) => sample.time_to_answer) || predicted?.per_token === null;
  return isPooled && !samples.some((sample) => sample.generation_tokens) ? CHARTS_OF_ANSWERS : CHARTS_OF_REPLIES;
}

/** What is predicted of answers; null where replies were predicted. */
function ofAnswers(name) {
  return (predicted) => (predicted.per_token === null ? predicted[name] : null);
}

/** What a few samples have of something, by their seconds. */
function rateOf(value) {
  return (samples, at) => {
    const some = samples.slice(Math.max(0, at - SMOOTH + 1), at + 1);
    const time = some.reduce((total, sample) => total + sample.seconds, 0);
    return some.reduce((total, sample) => total + value(sample), 0) / time;
  };
}
