// The intervals that the gateway has told, as columns for charts. At most as many as the gateway keeps itself.

const KEPT = 300;
const ROLLING = 5;
const FAILED = ["upstream_error", "gateway_error", "deadline", "refused", "shed"];

export class Series {
  process = "";
  intervals = [];

  get last() {
    return this.intervals.at(-1) ?? null;
  }

  get after() {
    return this.last?.number ?? 0;
  }

  // Another process (a restart, another worker) has other intervals: what was known is not its.
  add(process, intervals) {
    if (process !== this.process) this.clear();
    this.process = process;
    this.intervals.push(...intervals);
    this.intervals = this.intervals.slice(-KEPT);
  }

  clear() {
    this.process = "";
    this.intervals = [];
  }

  get times() {
    return this.intervals.map((each) => each.at_s);
  }

  column(read) {
    return this.intervals.map(read);
  }

  // Shares need more than one interval's requests: each place is that of the last ten seconds.
  rolling(part, whole) {
    return this.intervals.map((_, place) => share(this.intervals.slice(Math.max(0, place - ROLLING + 1), place + 1), part, whole));
  }

  // The latest ten seconds, and the share of all that is kept.
  recent(part, whole) {
    return share(this.intervals.slice(-ROLLING), part, whole);
  }
}

function share(intervals, part, whole) {
  let parts = 0;
  let wholes = 0;
  for (const each of intervals) {
    parts += each[part];
    wholes += each[whole];
  }
  return wholes ? Math.min(1, parts / wholes) : null;
}

export const served = (each) => (each.outcomes.ok ?? 0) / each.span_s;
export const failed = (each) => FAILED.reduce((sum, name) => sum + (each.outcomes[name] ?? 0), 0) / each.span_s;
export const total = (each) => Object.values(each.outcomes).reduce((sum, value) => sum + value, 0) / each.span_s;
