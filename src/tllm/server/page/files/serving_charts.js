// The charts of a server, over the last ten minutes.

import { count, percent, seconds } from "./amounts.js";

const SMOOTH = 3; // samples of which a rate is the mean

export const SERVING_CHARTS = [
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

/** Tokens of a few samples by their seconds. */
function rateOf(name) {
  return (samples, at) => {
    const some = samples.slice(Math.max(0, at - SMOOTH + 1), at + 1);
    const time = some.reduce((total, sample) => total + sample.seconds, 0);
    return some.reduce((total, sample) => total + sample[name], 0) / time;
  };
}
