// A run in the browser: what the server sent, with rows as typed arrays.

import type { Column, HistoryData, Move, RowData, RunData, Sample, SampleHead, Snapshot } from "./types";

export class Row {
  changes: Uint32Array; // tenths of a second times 16, plus the state
  name: string;
  facts: RowData["facts"];
  constructor(row: RowData) { this.name = row.name; this.facts = row.facts; this.changes = decode(row.data); }

  get length(): number { return this.changes.length; }
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
  moves: Move[] = [];

  constructor(data?: RunData) { if (data) this.replace(data); }

  replace(data: RunData): void {
    this.name = data.name; this.status = data.status;
    this.recipe = data.recipe ?? {};
    this.samples = data.samples ?? [];
    this.snapshot = data.snapshot ?? null;
    this.history = data.history;
    this.series = data.history.series;
    this.moves = data.history.moves;
    this.rows = data.history.rows.map((row) => new Row(row)).sort((a, b) => order(a) - order(b) || names.compare(a.name, b.name));
  }

  // Seconds since the start, up to the last event, or up to now if the run goes on.
  get end_s(): number {
    const now = this.status === "running" && this.snapshot?.t && this.history.start_t ? this.snapshot.t - this.history.start_t : 0;
    return Math.max(this.history.end_s, now);
  }
  last(name: string): number | null { return this.series[name]?.findLast((v) => v !== null) ?? null; }
  column(name: string): Column { return this.series[name] ?? []; }
  sum(name: string): number { return this.column(name).reduce<number>((total, v) => total + (v ?? 0), 0); }
}

const names = new Intl.Collator("en", { numeric: true });
// The trainer, its own engine, workers that the run pays for, lenders.
const order = (row: Row): number => (row.name === "trainer" ? 0 : row.name === "local" ? 1 : row.facts.lease === "borrowed" ? 3 : 2);

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
