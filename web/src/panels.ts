// Now, Money and Compare: cards and tables.

import { card, clip, dollars, duration, graded, h, number, table } from "./dom";
import type { Policy, Run } from "./run";
import { COLORS } from "./timeline";
import type { Money, Plan } from "./types";

const STATE_OF: Record<string, string> = { paused: "training", prefill_again: "prefill again" };
const HOLDER_STATES: Record<string, string> = { paused: "training or paused", prefill_again: "prefill again" };

// What stands above and below the charts of the tab Now.
export function now(run: Run): [HTMLElement, HTMLElement] {
  const { history, snapshot } = run, steps = Number(run.recipe.steps ?? history.facts.steps ?? 0), running = run.status === "running";
  const workers = (snapshot?.leases ?? []).reduce((sum, [, , count]) => sum + count, 0);
  const { money } = history, each = (one: (policy: Policy) => HTMLElement): HTMLElement[] => run.policies.map(one);
  const { lost } = history, moved = running ? snapshot?.moved ?? 0 : run.sum("moved");
  return [
    h("div", { class: "cards" },
      each((p) => card(`step${p.suffix}`, `${p.data.step}${steps ? ` / ${steps}` : ""}`, steps ? progress(p.data.step / steps) : "")),
      each((p) => { const last = p.data.evals.at(-1); return card(`reward${p.suffix}`, number(p.last("reward")), last ? `held-out: ${number(last[2])} after step ${last[0]}${graded(last)}` : ""); }),
      card("tokens/s", number(run.lead.last("tok_per_s")), `${number(run.sum("made"))} generated so far`),
      card("cost so far", dollars(money.usd || null), money.usd_per_million !== null ? `${dollars(money.usd_per_million)} per million trained tokens` : "no prices are known"),
      card(running ? "workers" : "workers at the end", running ? workers : run.lead.last("workers") ?? 0, `${number(lost)} lost so far`),
      card("responses open", running ? snapshot?.open ?? "–" : 0, `${running ? `${snapshot?.queued ?? 0} queued; ` : ""}${number(moved)} moved so far`),
      each((p) => { const bound = p.last("staleness_bound"); /* null: synchronous, or the log of an older version */ return card(`staleness${p.suffix}`, number(p.last("staleness_mean") ?? 0), `largest: ${number(p.last("staleness_max") ?? 0)}${bound === null ? "" : `; bound: ${number(bound)}`}`); }),
      each((p) => trainer(p, running))),
    h("section", {}, history.notes.map((note) => h("p", { class: "dim" }, note)), running && workers ? h("div", { class: "split" }, h("div", {}, h("h2", {}, "Workers by lease and state"), byLease(run)), h("div", {}, h("h2", {}, "Workers"), workerTable(run))) : null,
      h("h2", {}, "Last problems"), problems(run))];
}

const progress = (share: number): HTMLElement => h("div", { class: "progress" }, h("i", { style: `width:${Math.min(100, 100 * share)}%` }));

// What the trainer of a policy does now, or how the run has ended.
function trainer(policy: Policy, running: boolean): HTMLElement {
  const { run } = policy, wait = policy.last("train_wait_s"), step_s = policy.last("s"), all_s = policy.sum("s");
  const row = run.rows.find((r) => r.name === `trainer ${policy.name}`.trim()), state = row?.length ? run.history.states[row.state(row.length - 1)] ?? "–" : "–";
  if (running) return card(`trainer${policy.suffix}`, state, wait !== null && step_s ? `waited ${((100 * wait) / step_s).toFixed(0)} % of the last step` : "");
  return card(`run${policy.suffix}`, run.status, all_s ? `trainer waited ${((100 * policy.sum("train_wait_s")) / all_s).toFixed(0)} %` : "");
}

function byLease(run: Run): HTMLElement {
  return table(["lease", "state", "workers"], (run.snapshot?.leases ?? []).map(([lease, state, count]) => [clip(lease, 40), clip(state, 40), count]), [2]);
}

function workerTable(run: Run): HTMLElement {
  const shown = run.snapshot?.workers ?? [], lends = shown.some((w) => w.lender);
  return table(["worker", "device", "state", "version", "running", "tok/s", "age", ...(lends ? ["lends"] : [])], shown.map((w) => [clip(w.worker, 40), clip(w.device, 30), w.state, `${w.base ?? ""} ${Object.values(w.versions ?? { "": w.version }).join("/")}`.trim(), `${w.running}/${w.slots}`, number(w.tok_per_s), duration(w.age_s),
    ...(lends ? [w.lender ? `${Math.round(100 * w.lender.lent)} % of its time${w.lender.in_use ? "" : ", not in use"}` : ""] : [])]), [3, 4, 5, 6]);
}

function problems(run: Run): HTMLElement {
  const list = run.history.problems.slice(-15).reverse();
  const unreadable = run.history.unreadable ? h("p", { class: "dim" }, `${run.history.unreadable} events in the log have fields that are not those of windfall. They are left out.`) : null;
  if (!list.length) return unreadable ?? h("p", { class: "dim" }, "None.");
  return h("div", {}, unreadable, table(["when", "what", "who", "why"], list.map((p) => [duration(p.t), p.name.replaceAll("_", " "), clip(String(p.worker ?? p.response ?? p.peer ?? p.sink ?? p.source ?? p.policy ?? ""), 60), clip(String(p.why ?? p.error ?? ""), 300)])));
}

export function money(run: Run): HTMLElement {
  const { money: m, advice } = run.history, holders = Object.entries(m.holders).sort(([a], [b]) => HOLDERS.indexOf(a) - HOLDERS.indexOf(b)), states = [...new Set(holders.flatMap(([, a]) => Object.keys({ ...a.usd, ...a.seconds })))].sort((a, b) => spent(m, b) - spent(m, a));
  const stateColor = (state: string) => COLORS[run.history.states.indexOf(STATE_OF[state] ?? state)] ?? "#94a3b8";
  const name = (state: string) => HOLDER_STATES[state] ?? state, total = m.usd || 0;
  const cell = (state: string, holder: string) => { const a = m.holders[holder]!, usd = a.usd[state]; return usd !== undefined ? dollars(usd) : a.seconds[state] ? duration(a.seconds[state]!) : ""; };
  const shares = states.map((s) => [s, holders.reduce((sum, [, a]) => sum + (a.usd[s] ?? 0), 0)] as const).filter(([, usd]) => usd > 0).sort((a, b) => b[1] - a[1]);
  const seconds = holders.reduce((x, [, a]) => x + sum(a.seconds), 0);
  const sums = (state: string): string[] => {
    const usd = holders.reduce((x, [, a]) => x + (a.usd[state] ?? 0), 0), s = holders.reduce((x, [, a]) => x + (a.seconds[state] ?? 0), 0);
    return total ? [dollars(usd), percent(usd / total)] : [duration(s), percent(s / (seconds || 1))];
  };
  return h("section", {},
    h("div", { class: "cards wide" },
      card("cost", dollars(total || null), m.unpriced_s > 0 ? `a lower bound: ${duration(m.unpriced_s)} have no known price` : "every worker-second is priced"),
      card("per million trained tokens", dollars(m.usd_per_million), `${number(m.trained)} trained`),
      m.alone ? card("on the trainer's machine alone", dollars(m.alone.usd), `${dollars(m.alone.usd_per_million)} per million, in ${duration(m.alone.s)}; by the speed of ${m.alone.measured_on}`)
        : card("on the trainer's machine alone", "–", "not known: neither the trainer nor a reserved worker has generated"),
      HOLDERS.filter((holder) => m.holders[holder]).map((holder) => holderCard(holder, m))),
    total ? h("div", { class: "stack" }, shares.map(([s, usd]) => h("i", { style: `width:${(100 * usd) / total}%;background:${stateColor(s)}`, title: `${name(s)}: ${dollars(usd)}` }, usd / total > 0.09 ? `${name(s)} ${((100 * usd) / total).toFixed(0)} %` : ""))) : null,
    h("h2", {}, "Where it went"),
    holders.length ? table(["", ...holders.map(([holder]) => holder), "all", "share"], [
      ...states.map((state) => [h("span", { class: "key" }, h("i", { style: `background:${stateColor(state)}` }), name(state)), ...holders.map(([holder]) => cell(state, holder)), ...sums(state)]),
      [h("b", {}, "total"), ...holders.map(([, a]) => h("b", {}, Object.keys(a.usd).length ? dollars(sum(a.usd)) : duration(sum(a.seconds)))), h("b", {}, total ? dollars(total) : duration(seconds)), ""],
      ["tokens generated", ...holders.map(([, a]) => number(a.tokens)), number(holders.reduce((x, [, a]) => x + a.tokens, 0)), ""]], [...holders.map((_, n) => n + 1), holders.length + 1, holders.length + 2], "compact") : h("p", { class: "dim" }, "No bill yet: the first one comes with the first step."),
    byPolicy(run),
    h("h2", {}, "Advice"),
    Object.keys(advice).length ? table(["workers of kind", "now", "advised", "why", "tokens per $ now", "then", "change"], Object.entries(advice).map(([lease, a]) => [clip(lease, 40), number(a.now), number(a.count), clip(a.why, 300), number(a.tokens_per_usd_now), number(a.tokens_per_usd_best), change(a.tokens_per_usd_now, a.tokens_per_usd_best)]), [1, 2, 4, 5, 6]) : m.gathering ? null : h("p", { class: "dim" }, "None."),
    m.gathering ? h("p", {}, m.gathering) : null);
}

// What each of several policies cost.
function byPolicy(run: Run): HTMLElement | null {
  const { money: m } = run.history, all = Object.entries(m.policies).filter(([name]) => name);
  const trained = (name: string): number => run.history.policies[name]?.trained ?? 0;
  return all.length ? h("section", {}, h("h2", {}, "By policy"), table(["policy", "cost", "share", "tokens trained", "$ per million"],
    all.map(([name, usd]) => [clip(name, 40), dollars(usd), m.usd ? percent(usd / m.usd) : "–", number(trained(name)), dollars(trained(name) && usd ? (1e6 * usd) / trained(name) : null)]), [1, 2, 3, 4], "compact")) : null;
}

// What was spent on a state, by which states are ordered: dollars, or seconds if nothing has a price.
const spent = (m: Money, state: string): number => Object.values(m.holders).reduce((x, a) => x + ((m.usd ? a.usd : a.seconds)[state] ?? 0), 0);
const sum = (amounts: Record<string, number>): number => Object.values(amounts).reduce((x, y) => x + y, 0);
const percent = (share: number): string => `${(100 * share).toFixed(1)} %`;
const change = (now: number | null, then: number | null): string => (now && then ? `${then >= now ? "+" : ""}${((100 * then) / now - 100).toFixed(0)} %` : "–");

const HOLDERS = ["trainer", "reserved", "spot", "borrowed", "traffic"];

// What one kind of machine cost, and what came of it.
function holderCard(holder: string, m: Money): HTMLElement {
  const a = m.holders[holder]!, seconds = Object.values(a.seconds).reduce((x, y) => x + y, 0), usd = Object.keys(a.usd).length ? Object.values(a.usd).reduce((x, y) => x + y, 0) : null;
  const lost = (a.seconds.lost ?? 0) / (seconds || 1), worked = (a.seconds.generating ?? 0) / (seconds || 1);
  const busy = (a.seconds.training ?? 0) + (a.seconds.paused ?? 0), did = holder === "trainer" && !a.tokens ? `${duration(seconds)}; ${((100 * busy) / (seconds || 1)).toFixed(0)} % training` : `${number(a.tokens)} tokens in ${duration(seconds)} of machines; ${(100 * worked).toFixed(0)} % generating`;
  const facts = [did, lost > 0 ? `${(100 * lost).toFixed(1)} % lost` : ""];
  if (holder === "borrowed" && m.borrowed) facts.push(`${(100 * m.borrowed.share).toFixed(0)} % of all tokens${m.borrowed.saved_usd !== null ? `; saved ${dollars(m.borrowed.saved_usd)} at the price of ${clip(m.borrowed.priced_as, 40)}` : ""}`);
  if (holder === "traffic") return card("traffic", dollars(usd), "of weights between regions and out of the bucket");
  return card(holder === "trainer" ? "trainer's machine" : `${holder} workers`, usd === null ? "no price" : dollars(usd), facts.filter(Boolean).join("; "));
}

// One column of the comparison: a policy of a run, or the plan of a run.
interface Column { title: string; policy: Policy; plan: Plan | null; base: Column | null }

function columns(runs: Run[]): Column[] {
  const out: Column[] = [];
  for (const run of runs) for (const policy of run.policies) {
    const base = out.find((c) => c.policy.name === policy.name) ?? null, plan = run.recipe.plan ?? null;
    const column = { title: `${run.name}${policy.suffix} (${run.status})`, policy, plan: null, base };
    out.push(column);
    if (plan && policy === run.lead) out.push({ title: `${run.name} (planned)`, policy, plan, base: column });
  }
  return out;
}

// `planned`: what a plan says about the same thing.
interface Line { label: string; value: (policy: Policy) => number | null; planned?: (plan: Plan) => number | null; format: (v: number | null) => string; note?: (policy: Policy) => string }
const LINES: Line[] = [
  { label: "steps", value: (p) => p.data.step, format: number },
  { label: "time", value: (p) => p.run.end_s, format: (v) => (v === null ? "–" : duration(v)) },
  { label: "seconds per step", value: (p) => mean(p, "s"), planned: (plan) => plan.step_s, format: number },
  { label: "reward of the last step", value: (p) => p.last("reward"), format: number },
  { label: "reward on held-out tasks", value: (p) => p.data.evals.at(-1)?.[2] ?? null, format: number, note: (p) => (p.data.evals.length ? graded(p.data.evals.at(-1)!) : "") },
  { label: "tokens generated per second", value: (p) => rate(p, "made", p.run.policies), format: number },
  { label: "tokens trained per second", value: (p) => rate(p, "trained"), planned: (plan) => plan.tok_per_s, format: number },
  { label: "tokens trained", value: (p) => p.data.trained, format: number },
  { label: "cost", value: (p) => usd(p), format: dollars },
  { label: "$ per hour", value: (p) => (usd(p) && p.run.end_s ? (3600 * usd(p)!) / p.run.end_s : null), planned: (plan) => plan.usd_per_h, format: dollars },
  { label: "$ per million trained tokens", value: (p) => perMillion(p), planned: (plan) => plan.usd_per_million, format: dollars },
  { label: "workers, mean", value: (p) => mean(p, "workers"), planned: (plan) => plan.workers, format: number },
  { label: "workers lost", value: (p) => p.run.history.lost, format: number },
  { label: "responses moved", value: (p) => p.run.sum("moved"), format: number },
  { label: "tokens prefilled again", value: (p) => p.run.sum("prefilled_again"), format: number },
  { label: "trainer waited", value: (p) => share(p), format: (v) => (v === null ? "–" : percent(v)) },
];

export function compare(runs: Run[]): HTMLElement {
  const all = columns(runs), simulated = runs.some((r) => r.status === "simulated"), planned = all.some((c) => c.plan);
  const value = (line: Line, c: Column): number | null => (c.plan ? line.planned?.(c.plan) ?? null : line.value(c.policy));
  const cell = (line: Line, c: Column): (string | HTMLElement)[] => {
    const v = value(line, c), base = c.base ? value(line, c.base) : null;
    if (v === null && c.plan) return [""];
    return [line.format(v), c.plan ? "" : line.note?.(c.policy) ?? "", v !== null && base ? h("span", { class: "dim" }, ` (${v >= base ? "+" : ""}${((100 * v) / base - 100).toFixed(1)} %)`) : ""];
  };
  const notes = [
    all.length > 1 ? `Percentages: relative to ${runs[0]!.name}${planned ? "; those of a plan: relative to its run" : ""}.` : "Give several runs to see them beside each other, for example a run, and a simulation that predicts it: windfall page RUN OTHER",
    simulated ? "A simulation predicts times and costs; it learns nothing, so it has no rewards." : "",
    "Means and rates leave out the first step, which includes start-up.",
    planned ? "`windfall plan --check RUN` compares a plan part by part." : "",
  ];
  return h("section", {}, table(["", ...all.map((c) => c.title)], LINES.map((line) => [line.label, ...all.map((c) => cell(line, c))]), all.map((_, n) => n + 1), "compact"), notes.filter(Boolean).map((text) => h("p", { class: "dim" }, text)));
}
// Steps after the first one, which includes start-up. In a run that is so long that a point has several steps, that does not matter.
const later = (p: Policy, column: string): number[] => p.column(column).slice(p.data.stride === 1 && p.column("step").length > 1 ? 1 : 0).filter((v): v is number => v !== null);
const total = (values: number[]): number => values.reduce((x, y) => x + y, 0);
const mean = (p: Policy, column: string): number | null => { const v = later(p, column); return v.length ? total(v) / v.length / (column === "s" ? p.data.stride : 1) : null; };
// What these policies made in the steps of this one, per second.
const rate = (p: Policy, column: string, of = [p]): number | null => { const s = total(later(p, "s")); return s ? total(of.flatMap((q) => later(q, column))) / s : null; };
const usd = (p: Policy): number | null => p.run.history.money.policies[p.name] || null;
const perMillion = (p: Policy): number | null => { const tokens = total(later(p, "trained")), cost = total(later(p, "usd")); return tokens && cost ? (1e6 * cost) / tokens : null; };
const share = (p: Policy): number | null => { const s = total(later(p, "s")); return s ? total(later(p, "train_wait_s")) / s : null; };
