// Numbers with units, as `tllm status` writes them.

/** Bytes with a binary unit: 12.3 MiB. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toFixed([0, 1, 1, 2][unit])} ${units[unit]}`;
}

/** Seconds in the unit that reads best: 430 µs, 12.1 ms, 2.31 s, 3 min. */
export function seconds(value) {
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 1) return `${(1e3 * value).toPrecision(3)} ms`;
  return value < 120 ? `${value.toPrecision(3)} s` : `${Math.round(value / 60)} min`;
}

/** A rate or a count: 0, 3.2, 41, 1,204. */
export function count(value) {
  return value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

/** So many of what `one` names, whose plural ends with s: 1 core, 1,204 tokens. */
export const counted = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

export const percent = (part) => `${Math.round(100 * part)} %`;

/** The time of day of a Unix time. */
export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
