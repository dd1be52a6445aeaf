// A run in the browser: what the server sent, with rows as typed arrays, and later changes applied to it.

import type { Column, HistoryData, RowData, RunData, Sample, SampleHead, Snapshot } from "./types";

export class Row {
  changes = new Uint32Array(16); // tenths of a second times 16, plus the state
  length = 0;
  constructor(public name: string, public facts: RowData["facts"], public slice: number) {}

  apply(row: RowData): boolean {
    if (row.from > this.length || (row.from > 0 && row.slice !== this.slice)) return false;
    const text = atob(row.data), bytes = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
    const added = new Uint32Array(bytes.buffer, 0, bytes.length >> 2);
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

export class Run {
  name = ""; status = ""; recipe: RunData["recipe"] = {};
  history!: HistoryData;
  snapshot: Snapshot | null = null;
  series: Record<string, Column> = {};
  rows: Row[] = [];
  samples: Sample[] = [];
  private byName = new Map<string, Row>();

  constructor(data?: RunData) { if (data) this.replace(data); }

  replace(data: RunData): void {
    this.recipe = data.recipe ?? {};
    this.samples = data.samples ?? [];
    this.series = {};
    this.rows = [];
    this.byName.clear();
    this.apply(data);
  }

  // False: something is missing, so everything must be loaded again.
  apply(data: RunData): boolean {
    const { history } = data;
    this.name = data.name; this.status = data.status; this.snapshot = data.snapshot;
    for (const [name, column] of Object.entries(history.series)) {
      if (typeof column === "number") continue;
      const before = this.series[name] ?? [];
      if (before.length < history.series.from) return false;
      this.series[name] = history.series.from ? before.slice(0, history.series.from).concat(column) : column;
    }
    let complete = true, added = false;
    for (const data of history.rows) {
      let row = this.byName.get(data.name);
      if (!row) {
        row = new Row(data.name, data.facts, data.slice);
        this.byName.set(data.name, row);
        this.rows.push(row);
        added = true;
      }
      complete = row.apply(data) && complete;
    }
    if (added) this.rows.sort((a, b) => order(a.name) - order(b.name) || names.compare(a.name, b.name));
    history.rows = [];
    this.history = history;
    return complete;
  }

  last(name: string): number | null { return this.series[name]?.findLast((v) => v !== null) ?? null; }
  column(name: string): Column { return this.series[name] ?? []; }
  sum(name: string): number { return this.column(name).reduce<number>((total, v) => total + (v ?? 0), 0); }
}

const names = new Intl.Collator("en", { numeric: true });
const order = (name: string): number => (name === "trainer" ? 0 : name === "local" ? 1 : 2);

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
