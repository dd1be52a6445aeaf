// What the server sends: see History.full in src/windfall/page/history.py.

export type Column = (number | null)[];
export type Series = { from: number } & Record<string, Column | number>;
export type Facts = Record<string, string | number | boolean | null>;
export interface RowData { name: string; from: number; slice: number; data: string; facts: Facts }
export interface Problem extends Record<string, string | number | boolean | null> { t: number; name: string }
export interface Holder { usd: Record<string, number>; seconds: Record<string, number>; tokens: number; unpriced_s: number }
export interface Money {
  holders: Record<string, Holder>; usd: number; trained: number; usd_per_million: number | null; unpriced_s: number;
  alone: { usd: number | null; usd_per_million: number | null; s: number; tok_per_s: number; measured_on: string } | null;
}
export interface Advice { now: number | null; count: number | null; tokens_per_usd_now: number | null; tokens_per_usd_best: number | null; why: string }
export interface HistoryData {
  number: number; start_t: number | null; end_s: number; states: string[]; stride: number; step: number; facts: Facts;
  ended: { step: number; finished: boolean } | null; evals: [number, number, number | null][]; problems: Problem[];
  moves: [number, string, string, number][]; advice: Record<string, Advice>; money: Money; staleness: number[];
  dropped_rows: number; series: Series; rows: RowData[];
}
export interface WorkerNow {
  worker: string; lease: string; kind: string; device: string; state: string; running: number; slots: number;
  tok_per_s: number; made: number; moved: number; age_s: number; why: string; version: number; price_usd_per_h: number;
}
export interface Snapshot {
  t: number; step: number; steps: number; version: number | null; queued: number; open: number; lost: number;
  counts: Record<string, number>; workers: WorkerNow[];
}
export interface SampleHead {
  step: number; t: number; id: string; task: string; reward: number | null; finish: string; length: number;
  turns: number; moved: boolean; oldest: number; at?: number;
}
export interface Sample extends SampleHead {
  prompt: string; cut: number; tokens: string[]; logprobs: number[]; versions: [number, number][]; workers: [string, number][];
}
export interface RunData {
  name: string; status: string; recipe: Record<string, string | number>; history: HistoryData;
  snapshot: Snapshot | null; samples: Sample[];
}
export interface PageData { live: boolean; runs: RunData[] }
