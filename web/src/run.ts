// A run in the browser: what the server sent, with rows as typed arrays, and later changes applied to it.

import type { Changes, Column, HistoryData, Move, PolicyData, RowData, RunData, Sample, SampleHead, Series, Snapshot } from "./types";

export class Row {
  changes = new Uint32Array(16); // tenths of a second times 16, plus the state
  length = 0;
  constructor(public name: string, public facts: RowData["facts"], public slice: number) {}

  apply(row: RowData): boolean {
    if (row.from > this.length || (row.from > 0 && row.slice !== this.slice)) return false;
    const added = decode(row.data);
    const length = row.from + added.length;
    if (length > this.changes.length) {
      const grown = new Uint32Array(row.from ? 2 * length : length);
      grown.set(this.changes.subarray(0, row.from));
      this.changes = grown;
    }
    this.changes.set(added, row.from);
    this.length = length;
    this.facts = row.facts;
    this.slice = row.slice;
    return true;
  }
  start(n: number): number { return Math.floor(this.changes[n]! / 16) / 10; }
  state(n: number): number { return this.changes[n]! % 16; }
  // Index of the change that is in effect at this time, or -1.
  at(seconds: number): number {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start(middle) <= seconds) low = middle + 1; else high = middle;
    }
    return low - 1;
  }
}

// One policy of a run, step by step. A run has one, without a name, or several.
export class Policy {
  series: Record<string, Column> = {};
  constructor(public name: string, public run: Run) {}
  get data(): PolicyData { return this.run.history.policies[this.name] ?? { step: 0, stride: 1, trained: 0, evals: [], staleness: [] }; }
  last(name: string): number | null { return this.series[name]?.findLast((v) => v !== null) ?? null; }
  column(name: string): Column { return this.series[name] ?? []; }
  sum(name: string): number { return this.column(name).reduce<number>((total, v) => total + (v ?? 0), 0); }
  // After the name of something, such as "reward".
  get suffix(): string { return this.name ? `, ${this.name}` : ""; }

  apply(series: Series): boolean {
    for (const [name, column] of Object.entries(series)) {
      if (typeof column === "number") continue;
      const before = this.column(name);
      if (before.length < series.from) return false;
      this.series[name] = series.from ? before.slice(0, series.from).concat(column) : column;
    }
    return true;
  }
}

export class Run {
  name = ""; status = ""; recipe: RunData["recipe"] = {};
  history!: HistoryData;
  snapshot: Snapshot | null = null;
  policies: Policy[] = [];
  rows: Row[] = [];
  samples: Sample[] = [];
  moves: Move[] = [];
  private movesFrom = 0;
  private byName = new Map<string, Row>();

  constructor(data?: RunData) { if (data) this.replace(data); }

  replace(data: RunData): void {
    this.recipe = data.recipe ?? {};
    this.samples = data.samples ?? [];
    this.policies = [];
    this.rows = [];
    this.moves = []; this.movesFrom = 0; this.snapshot = null;
    this.byName.clear();
    this.apply(data);
  }

  // False: something is missing, so everything must be loaded again.
  apply(data: Changes): boolean {
    const { series, rows, moves, ...history } = data.history;
    this.name = data.name ?? this.name; this.status = data.status ?? this.status;
    if (data.snapshot) this.snapshot = { ...this.snapshot, ...data.snapshot };
    if (history.policies) this.policies = Object.keys(history.policies).map((name) => this.policies.find((p) => p.name === name) ?? new Policy(name, this));
    for (const policy of this.policies) if (series?.[policy.name] && !policy.apply(series[policy.name]!)) return false;
    if (moves) {
      if (moves.from < this.movesFrom || moves.from > this.movesFrom + this.moves.length) { this.moves = []; this.movesFrom = moves.from; }
      this.moves = this.moves.slice(0, moves.from - this.movesFrom).concat(moves.list);
      const extra = this.moves.length - MAX_MOVES;
      if (extra > 0) { this.moves.splice(0, extra); this.movesFrom += extra; }
    }
    let complete = true, added = false;
    for (const data of rows ?? []) {
      let row = this.byName.get(data.name);
      if (!row) {
        row = new Row(data.name, data.facts, data.slice);
        this.byName.set(data.name, row);
        this.rows.push(row);
        added = true;
      }
      complete = row.apply(data) && complete;
    }
    if (added) this.rows.sort((a, b) => order(a) - order(b) || names.compare(a.name, b.name));
    this.history = { ...this.history, ...history } as HistoryData;
    return complete;
  }

  // Seconds since the start, up to the last event, or up to now if the run goes on.
  get end_s(): number {
    const now = this.status === "running" && this.snapshot?.t && this.history.start_t ? this.snapshot.t - this.history.start_t : 0;
    return Math.max(this.history.end_s, now);
  }
  // The first policy, for what all have in common.
  get lead(): Policy { return this.policies[0]!; }
  sum(name: string): number { return this.policies.reduce((total, policy) => total + policy.sum(name), 0); }
}

const names = new Intl.Collator("en", { numeric: true });
// The trainer, its own engine, workers that the run pays for, lenders.
const order = (row: Row): number => (row.name.startsWith("trainer") ? 0 : row.name === "local" ? 1 : row.facts.lease === "borrowed" ? 3 : 2);
const MAX_MOVES = 20_000;

function decode(base64: string): Uint32Array {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  return new Uint32Array(bytes.buffer, 0, bytes.length >> 2);
}

// Where samples come from: the file itself, or the server.
export class Samples {
  private cache = new Map<number, Sample>();
  constructor(private run: Run, private url: ((path: string) => string) | null) {}
  async list(): Promise<SampleHead[]> {
    if (!this.url) return this.run.samples.map((sample, at) => ({ ...sample, at }));
    const answer = await fetch(this.url("samples"));
    return answer.ok ? ((await answer.json()) as SampleHead[]) : [];
  }
  async get(at: number): Promise<Sample | null> {
    if (!this.url) return this.run.samples[at] ?? null;
    const known = this.cache.get(at);
    if (known) return known;
    const answer = await fetch(`${this.url("sample")}&at=${at}`);
    if (!answer.ok) return null;
    const sample = (await answer.json()) as Sample;
    if (this.cache.size > 50) this.cache.clear();
    this.cache.set(at, sample);
    return sample;
  }
}
