// What the server sends: see History.full in src/windfall/page/history.py.

export type Column = (number | null)[];
export type Series = { from: number } & Record<string, Column | number>;
export type Facts = Record<string, string | number | boolean | null>;
export interface RowData { name: string; from: number; slice: number; data: string; facts: Facts }
export type Move = [number, string, string, number];
export interface Problem extends Record<string, string | number | boolean | null> { t: number; name: string }
export interface Holder { usd: Record<string, number>; seconds: Record<string, number>; tokens: number; unpriced_s: number }
export interface Money {
  holders: Record<string, Holder>; usd: number; trained: number; usd_per_million: number | null; unpriced_s: number;
  borrowed: { tokens: number; share: number; hours: number; saved_usd: number | null; priced_as: string } | null;
  alone: { usd: number | null; usd_per_million: number | null; s: number; tok_per_s: number; measured_on: string } | null;
  gathering: string;
  policies: Record<string, number>; // dollars, which add up to the bill
}
export interface Advice { now: number | null; count: number | null; tokens_per_usd_now: number | null; tokens_per_usd_best: number | null; why: string }
// Step, seconds, reward, graded responses, all responses. The log of an older version does not have the numbers of responses.
export type Evaluation = [number, number, number | null, number | null, number | null];
// By name of the policy; "" if the run has one.
export interface PolicyData { step: number; stride: number; trained: number; evals: Evaluation[]; staleness: number[] }
export interface HistoryData {
  number: number; start_t: number | null; end_s: number; states: string[]; step: number; lost: number; facts: Facts;
  ended: { step: number; finished: boolean } | null; problems: Problem[]; policies: Record<string, PolicyData>;
  moves: { from: number; list: Move[] }; advice: Record<string, Advice>; money: Money;
  dropped_rows: number; unreadable: number; notes: string[]; series: Record<string, Series>; rows: RowData[];
}
export interface WorkerNow {
  worker: string; lease: string; kind: string; device: string; state: string; running: number; slots: number;
  tok_per_s: number; age_s: number; version: number; base?: string; versions?: Record<string, number>;
  lender?: { in_use: boolean; slots: number; state: string; use: number; lent: number };
}
export interface Snapshot {
  t?: number; step?: number; steps?: number; version?: number; queued?: number; open?: number; lost?: number; moved?: number;
  leases: [string, string, number][]; workers?: WorkerNow[];
}
export interface SampleHead {
  step: number; t: number; id: string; task: string; reward: number | null; finish: string; length: number;
  turns: number; tools?: number; moved: boolean; oldest: number; at?: number;
}
// `calls`: the position of the first token of the turn that made it, the tool and its arguments.
export interface Segment {
  prompt: string; cut: number; tokens: string[]; logprobs: (number | null)[]; versions: [number, number][]; workers: [string, number][];
  calls?: [number, string, string][]; role?: string;
}
export interface Sample extends SampleHead, Segment { more?: Segment[]; scores?: [string, number | null][] }
// What `windfall plan` predicted of a step.
export interface Plan { name: string; step_s: number | null; tok_per_s: number | null; usd_per_h: number | null; usd_per_million: number | null; workers: number | null }
export interface Recipe { model?: string; env?: string; algorithm?: string; steps?: number; samples?: number; plan?: Plan }
export interface RunData {
  name: string; status: string; recipe: Recipe; history: HistoryData;
  snapshot: Snapshot | null; samples: Sample[];
}
// After everything, a live page gets only what has changed.
export type Changes = Partial<Omit<RunData, "history">> & { history: Partial<HistoryData> };
export interface PageData { live: boolean; runs: RunData[] }
