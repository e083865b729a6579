// What the server has said of its last minutes: its samples and events, and what a time of several samples was like.

const KEPT = { "/v1/cluster/live": 600, "/v1/training/live": 5000 }; // samples: ten minutes; steps of a run
const KEPT_EVENTS = 200;
const BUSY_SECONDS = 5; // over which shares of time and rates are averaged

export class History {
  /** `source`: the path whose reports it keeps. */
  constructor(source) {
    this.source = source;
    this.samples = [];
    this.events = [];
    this.latest = null; // the report of this moment: sequences, waits_for, …
  }

  /** The path that asks for what is new. */
  get path() {
    const number = (items) => (items.length ? items[items.length - 1].number : -1);
    return `${this.source}?after=${number(this.samples)}&events_after=${number(this.events)}`;
  }

  /** Take in a report. False where the server was started anew: what was kept is forgotten, and has to be asked for. */
  add(report) {
    const isAnew = this.latest !== null && this.latest.run !== report.run;
    this.latest = report;
    if (isAnew) {
      this.samples = [];
      this.events = [];
      return false;
    }
    this.samples = [...this.samples, ...report.samples].slice(-KEPT[this.source]);
    this.events = [...this.events, ...report.events].slice(-KEPT_EVENTS);
    return true;
  }

  /** Of one node, over the last seconds: the part of the time in which it computed, and its seconds for a batch; null
   * where its samples do not say. */
  node(name) {
    const lately = this.lately().filter((sample) => name in (sample.nodes ?? {}));
    if (!lately.length) return { busy: null, step: null };
    const time = sum(lately.map((sample) => sample.seconds));
    const steps = lately.map((sample) => sample.nodes[name].step).filter((step) => step !== null);
    return {
      busy: sum(lately.map((sample) => sample.seconds * sample.nodes[name].busy)) / time,
      step: steps.length ? sum(steps) / steps.length : null,
    };
  }

  /** Bytes per second over the links from one set of ranks to another, over the last seconds; null where samples do not
   * say. */
  rate(sources, targets) {
    const lately = this.lately();
    if (!lately.some((sample) => sample.links)) return null;
    const time = sum(lately.map((sample) => sample.seconds));
    const links = sources.flatMap((from) => targets.map((to) => `${from}>${to}`));
    const moved = sum(lately.flatMap((sample) => links.map((link) => sample.links[link] ?? 0)));
    return time ? moved / time : 0;
  }

  lately() {
    return this.samples.slice(-BUSY_SECONDS);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
