// Now, Money and Compare: cards and tables.

import { card, clip, dollars, duration, h, number, table } from "./dom";
import type { Run } from "./run";
import { COLORS } from "./timeline";
import type { Money } from "./types";

const STATE_OF: Record<string, string> = { paused: "training", prefill_again: "prefill again" };
const HOLDER_STATES: Record<string, string> = { paused: "training or paused", prefill_again: "prefill again" };

// What stands above and below the charts of the tab Now.
export function now(run: Run): [HTMLElement, HTMLElement] {
  const { history, snapshot } = run, steps = Number(run.recipe.steps ?? history.facts.steps ?? 0), running = run.status === "running";
  const workers = (snapshot?.leases ?? []).reduce((sum, [, , count]) => sum + count, 0);
  const last = history.evals.at(-1), wait = run.last("train_wait_s"), step_s = run.last("s"), money = history.money;
  const busy = trainer(run);
  const { lost } = history, moved = running ? snapshot?.moved ?? 0 : run.sum("moved");
  return [
    h("div", { class: "cards" },
      card("step", `${history.step}${steps ? ` / ${steps}` : ""}`, steps ? progress(history.step / steps) : ""),
      card("reward", number(run.last("reward")), last ? `held-out: ${number(last[2])} after step ${last[0]}` : ""),
      card("tokens/s", number(run.last("tok_per_s")), `${number(run.sum("made"))} generated so far`),
      card("cost so far", dollars(money.usd || null), money.usd_per_million !== null ? `${dollars(money.usd_per_million)} per million trained tokens` : "no prices are known"),
      card(running ? "workers" : "last workers", running ? workers : run.last("workers") ?? 0, `${number(lost)} lost so far`),
      card("responses open", running ? snapshot?.open ?? "–" : 0, `${running ? `${snapshot?.queued ?? 0} queued; ` : ""}${number(moved)} moved so far`),
      card("staleness", number(run.last("staleness_mean") ?? 0), `largest: ${number(run.last("staleness_max") ?? 0)}`),
      card("trainer", running ? busy : run.status, wait !== null && step_s ? `waited ${((100 * wait) / step_s).toFixed(0)} % of the last step` : "")),
    h("section", {}, running && workers ? h("div", { class: "split" }, h("div", {}, h("h2", {}, "Workers by lease and state"), byLease(run)), h("div", {}, h("h2", {}, "Workers"), workerTable(run))) : null,
      h("h2", {}, "Last problems"), problems(run))];
}

const progress = (share: number): HTMLElement => h("div", { class: "progress" }, h("i", { style: `width:${Math.min(100, 100 * share)}%` }));

function trainer(run: Run): string {
  const row = run.rows.find((r) => r.name === "trainer" || r.name === "rank 0");
  return row?.length ? run.history.states[row.state(row.length - 1)] ?? "–" : "–";
}

function byLease(run: Run): HTMLElement {
  return table(["lease", "state", "workers"], (run.snapshot?.leases ?? []).map(([lease, state, count]) => [clip(lease, 40), clip(state, 40), count]), [2]);
}

function workerTable(run: Run): HTMLElement {
  const shown = run.snapshot?.workers ?? [], lends = shown.some((w) => w.lender);
  return table(["worker", "device", "state", "version", "running", "tok/s", "age", ...(lends ? ["lends"] : [])], shown.map((w) => [clip(w.worker, 40), clip(w.device, 30), w.state, w.version, `${w.running}/${w.slots}`, number(w.tok_per_s), duration(w.age_s),
    ...(lends ? [w.lender ? `${Math.round(100 * w.lender.lent)} % of its time${w.lender.in_use ? "" : ", not in use"}` : ""] : [])]), [3, 4, 5, 6]);
}

function problems(run: Run): HTMLElement {
  const list = run.history.problems.slice(-15).reverse();
  if (!list.length) return h("p", { class: "dim" }, "None.");
  return table(["when", "what", "who", "why"], list.map((p) => [duration(p.t), p.name.replaceAll("_", " "), clip(String(p.worker ?? p.response ?? p.peer ?? p.sink ?? ""), 60), clip(String(p.why ?? p.error ?? ""), 300)]));
}

export function money(run: Run): HTMLElement {
  const { money: m, advice } = run.history, holders = Object.entries(m.holders).sort(([a], [b]) => HOLDERS.indexOf(a) - HOLDERS.indexOf(b)), states = [...new Set(holders.flatMap(([, a]) => Object.keys({ ...a.usd, ...a.seconds })))];
  const stateColor = (state: string) => COLORS[run.history.states.indexOf(STATE_OF[state] ?? state)] ?? "#94a3b8";
  const name = (state: string) => HOLDER_STATES[state] ?? state, total = m.usd || 0;
  const cell = (state: string, holder: string) => { const a = m.holders[holder]!, usd = a.usd[state]; return usd !== undefined ? dollars(usd) : a.seconds[state] ? duration(a.seconds[state]!) : ""; };
  const shares = states.map((s) => [s, holders.reduce((sum, [, a]) => sum + (a.usd[s] ?? 0), 0)] as const).filter(([, usd]) => usd > 0).sort((a, b) => b[1] - a[1]);
  return h("section", {},
    h("div", { class: "cards wide" },
      card("cost", dollars(total || null), m.unpriced_s > 0 ? `a lower bound: ${duration(m.unpriced_s)} have no known price` : "every worker-second is priced"),
      card("per million trained tokens", dollars(m.usd_per_million), `${number(m.trained)} trained`),
      m.alone ? card("on the trainer's machine alone", dollars(m.alone.usd), `${dollars(m.alone.usd_per_million)} per million, in ${duration(m.alone.s)}; by the speed of ${m.alone.measured_on}`)
        : card("on the trainer's machine alone", "–", "not known: neither the trainer nor a reserved worker has generated"),
      HOLDERS.filter((holder) => m.holders[holder]).map((holder) => holderCard(holder, m))),
    total ? h("div", { class: "stack" }, shares.map(([s, usd]) => h("i", { style: `width:${(100 * usd) / total}%;background:${stateColor(s)}`, title: `${name(s)}: ${dollars(usd)}` }, usd / total > 0.09 ? `${name(s)} ${((100 * usd) / total).toFixed(0)} %` : ""))) : null,
    h("h2", {}, "Where it went"),
    holders.length ? table(["", ...holders.map(([holder]) => holder)], [...states.map((s) => [name(s), ...holders.map(([holder]) => cell(s, holder))]),
      ["total", ...holders.map(([, a]) => (Object.keys(a.usd).length ? dollars(Object.values(a.usd).reduce((x, y) => x + y, 0)) : duration(Object.values(a.seconds).reduce((x, y) => x + y, 0))))],
      ["tokens", ...holders.map(([, a]) => number(a.tokens))]], holders.map((_, n) => n + 1)) : h("p", { class: "dim" }, "No bill yet: the first one comes with the first step."),
    h("h2", {}, "Advice"),
    Object.keys(advice).length ? table(["workers of kind", "now", "advised", "tokens per $ now", "tokens per $ then", "change", "why"], Object.entries(advice).map(([lease, a]) => [clip(lease, 40), number(a.now), number(a.count), number(a.tokens_per_usd_now), number(a.tokens_per_usd_best), change(a.tokens_per_usd_now, a.tokens_per_usd_best), clip(a.why, 300)]), [1, 2, 3, 4, 5]) : h("p", { class: "dim" }, "None."));
}

const change = (now: number | null, then: number | null): string => (now && then ? `${then >= now ? "+" : ""}${((100 * then) / now - 100).toFixed(0)} %` : "–");

const HOLDERS = ["trainer", "reserved", "spot", "borrowed"];

// What one kind of machine cost, and what came of it.
function holderCard(holder: string, m: Money): HTMLElement {
  const a = m.holders[holder]!, seconds = Object.values(a.seconds).reduce((x, y) => x + y, 0), usd = Object.keys(a.usd).length ? Object.values(a.usd).reduce((x, y) => x + y, 0) : null;
  const lost = (a.seconds.lost ?? 0) / (seconds || 1), worked = (a.seconds.generating ?? 0) / (seconds || 1);
  const facts = [`${number(a.tokens)} tokens in ${duration(seconds)} of machines; ${(100 * worked).toFixed(0)} % generating`, lost > 0 ? `${(100 * lost).toFixed(1)} % lost` : ""];
  if (holder === "borrowed" && m.borrowed) facts.push(`${(100 * m.borrowed.share).toFixed(0)} % of all tokens${m.borrowed.saved_usd !== null ? `; saved ${dollars(m.borrowed.saved_usd)} at the price of ${clip(m.borrowed.priced_as, 40)}` : ""}`);
  return card(holder === "trainer" ? "trainer's machine" : `${holder} workers`, usd === null ? "no price" : dollars(usd), facts.filter(Boolean).join("; "));
}

export function compare(runs: Run[]): HTMLElement {
  const rows: [string, (run: Run) => number | null, (v: number | null) => string][] = [
    ["steps", (r) => r.history.step, number], ["time", (r) => r.end_s, (v) => duration(v ?? 0)], ["reward of the last step", (r) => r.last("reward"), number],
    ["reward on held-out tasks", (r) => r.history.evals.at(-1)?.[2] ?? null, number], ["tokens per second", (r) => mean(r, "made"), number],
    ["tokens generated", (r) => r.sum("made"), number], ["tokens trained", (r) => r.history.money.trained, number], ["cost", (r) => r.history.money.usd || null, dollars],
    ["$ per million trained tokens", (r) => r.history.money.usd_per_million, dollars], ["workers lost", (r) => r.history.lost, number], ["responses moved", (r) => r.sum("moved"), number],
    ["tokens prefilled again", (r) => r.sum("prefilled_again"), number], ["trainer waited", (r) => share(r), (v) => (v === null ? "–" : `${(100 * v).toFixed(1)} %`)],
  ];
  const versus = (v: number | null, base: number | null) => (v !== null && base ? ` (${v >= base ? "+" : ""}${((100 * v) / base - 100).toFixed(1)} %)` : "");
  return table(["", ...runs.map((r) => `${r.name} (${r.status})`)], rows.map(([label, value, format]) => [label, ...runs.map((r, n) => [format(value(r)), n ? h("span", { class: "dim" }, versus(value(r), value(runs[0]!))) : null])]), runs.map((_, n) => n + 1));
}
const mean = (r: Run, column: string): number | null => { const s = r.sum("s"); return s ? r.sum(column) / s : null; };
const share = (r: Run): number | null => { const s = r.sum("s"); return s ? r.sum("train_wait_s") / s : null; };
