// Browse sampled responses; tokens are colored by worker, version or log-prob.

import { clip, h, number } from "./dom";
import type { Run, Samples } from "./run";
import type { Sample, SampleHead, Segment } from "./types";

type Coloring = "worker" | "version" | "log-prob";
const PIECE = 20_000; // characters of one token that are shown

export class Responses {
  readonly element: HTMLElement;
  private list: SampleHead[] = [];
  private shown: SampleHead[] = [];
  private chosen: SampleHead | null = null;
  private step = -1; // the step of the run when the list was loaded
  private sample: Sample | null = null;
  private coloring: Coloring = "worker";
  private sort = "newest"; private filter = "";
  private rows = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Responses" });
  private detail = h("div", { class: "detail" });

  constructor(private run: Run, private samples: Samples) {
    const select = h("select", { "aria-label": "Order", change: () => { this.sort = select.value; this.show(); } },
      ["newest", "highest reward", "lowest reward", "longest", "shortest", "moved first", "most turns", "most tool calls", "task"].map((text) => h("option", {}, text)));
    const input = h("input", { type: "search", placeholder: "task, id or step", "aria-label": "Filter", input: () => { this.filter = input.value; this.show(); } });
    this.element = h("section", { class: "responses" }, h("div", {}, h("div", { class: "bar" }, select, input, h("button", { click: () => void this.load() }, "reload")), this.rows), this.detail);
    void this.load();
  }

  async load(): Promise<void> {
    this.step = this.run.history.step;
    this.list = await this.samples.list();
    this.show();
    if (!this.chosen && this.shown[0]) await this.choose(0);
  }
  // The run has gone on: its newest responses join the list, and what is open stays open.
  update(): void { if (this.run.history.step !== this.step) void this.load(); }
  key(key: string): boolean {
    const at = this.shown.findIndex((s) => same(s, this.chosen));
    if (key === "j" || key === "ArrowDown") void this.choose(at + 1);
    else if (key === "k" || key === "ArrowUp") void this.choose(at - 1);
    else if (key === "c") { this.coloring = this.coloring === "worker" ? "version" : this.coloring === "version" ? "log-prob" : "worker"; this.render(); }
    else return false;
    return true;
  }

  private show(): void {
    const orders: Record<string, (a: SampleHead, b: SampleHead) => number> = {
      newest: (a, b) => b.step - a.step, "highest reward": (a, b) => (b.reward ?? -1e9) - (a.reward ?? -1e9), "lowest reward": (a, b) => (a.reward ?? 1e9) - (b.reward ?? 1e9),
      longest: (a, b) => b.length - a.length, shortest: (a, b) => a.length - b.length, "moved first": (a, b) => Number(b.moved) - Number(a.moved) || b.step - a.step, task: (a, b) => a.task.localeCompare(b.task),
      "most turns": (a, b) => b.turns - a.turns, "most tool calls": (a, b) => (b.tools ?? 0) - (a.tools ?? 0),
    };
    const text = this.filter.toLowerCase();
    this.shown = this.list.filter((s) => !text || `${s.task} ${s.id} ${s.step}`.toLowerCase().includes(text)).sort(orders[this.sort]!).slice(0, 400);
    this.rows.replaceChildren(...this.shown.map((s, n) => h("button", { role: "option", class: "item", "aria-selected": String(same(s, this.chosen)), click: () => void this.choose(n) },
      h("b", {}, number(s.reward)), h("span", {}, `step ${s.step}`), h("span", {}, `${s.length} tok`), h("span", { class: "dim" }, clip(s.task, 40)), s.turns > 1 ? h("span", {}, `${s.turns} turns`) : null, s.moved ? h("span", { class: "moved" }, "moved") : null)));
    if (!this.list.length) {
      const off = Number(this.run.recipe.samples ?? 1) === 0;
      this.rows.replaceChildren(h("p", { class: "dim" }, off ? "This run keeps no responses (log.samples = 0)." : "No responses yet: the first ones come with the first step."));
    }
  }
  private async choose(n: number): Promise<void> {
    const head = this.shown[n];
    if (!head) return;
    this.chosen = head;
    [...this.rows.children].forEach((row, m) => row.setAttribute("aria-selected", String(m === n)));
    this.rows.children[n]?.scrollIntoView({ block: "nearest" });
    const sample = await this.samples.get(head.at ?? -1);
    if (!same(head, this.chosen)) return; // another one was chosen meanwhile
    this.sample = sample;
    if (sample) this.render(); else this.detail.replaceChildren(h("p", { class: "dim" }, "This response is no longer kept: the file of samples was full. Reload the list."));
  }
  private render(): void {
    const s = this.sample;
    if (!s) return;
    const segments: Segment[] = [s, ...(s.more ?? [])];
    const names = [...new Set(segments.flatMap((g) => g.workers.map(([w]) => w)).filter(Boolean))];
    const numbers = [...new Set(segments.flatMap((g) => g.versions.map(([v]) => v)).filter((v) => v >= 0))].sort((x, y) => x - y);
    const color = (token: Token): string => {
      if (this.coloring === "worker") return hue(names.indexOf(token.worker));
      return this.coloring === "version" ? hue(numbers.indexOf(token.version)) : likelihood(token.logprob ?? 0);
    };
    const buttons = (["worker", "version", "log-prob"] as const).map((c) => h("button", { class: c === this.coloring ? "on" : undefined, "aria-pressed": c === this.coloring, click: () => { this.coloring = c; this.render(); } }, c));
    const keys = this.coloring === "log-prob" ? [["likely", likelihood(0)], ["unlikely", likelihood(-4)]] : this.coloring === "worker" ? names.map((w, n) => [w, hue(n)]) : numbers.map((v, n) => [`version ${v}`, hue(n)]);
    const parts = [`reward ${number(s.reward)}`, ...(s.scores ?? []).map(([name, value]) => `${clip(name, 40)} ${number(value)}`), `${s.length} tokens`, plural(s.turns, "turn"), s.tools ? plural(s.tools, "tool call") : "", `step ${s.step}`, `ended by ${s.finish === "stop" ? "a stop token" : "the length limit"}`];
    this.detail.replaceChildren(
      h("div", { class: "bar" }, "color by ", buttons, h("div", { class: "legend" }, keys.map(([text, c]) => h("span", { class: "key" }, h("i", { style: `background:${c}` }), clip(text!, 40))))),
      h("p", { class: "dim" }, `${parts.filter(Boolean).join(", ")}; `, clip(`task ${s.task}, response ${s.id}`, 200)),
      ...segments.flatMap((g, n) => [n || g.role ? h("h2", {}, `segment ${n + 1}: ${g.role ?? "the agent changed its history"}`) : "", ...segment(g, s.turns > 1 || segments.length > 1, color)]));
  }
}

const same = (a: SampleHead, b: SampleHead | null): boolean => b !== null && a.id === b.id && a.step === b.step;

interface Token { text: string; worker: string; version: number; logprob: number | null; position: number }

// The prompt, the turns and what was observed between them.
function segment(g: Segment, labeled: boolean, color: (token: Token) => string): (Node | string)[] {
  const workers = spread(g.workers), versions = spread(g.versions), stretches: Token[][] = [];
  g.tokens.forEach((text, n) => {
    const token = { text, worker: workers[n] ?? "", version: versions[n] ?? 0, logprob: g.logprobs[n] ?? null, position: n };
    const last = stretches.at(-1);
    if (last && last[0]!.version < 0 === token.version < 0) last.push(token); else stretches.push([token]);
  });
  const out: (Node | string)[] = [h("div", { class: "prompt", dir: "auto" }, clip(g.prompt, PIECE))];
  let turns = 0;
  for (const stretch of stretches) {
    const first = stretch[0]!;
    if (first.version < 0) {
      out.push(h("div", { class: "turn" }, "observed: from the environment or a tool"), h("div", { class: "tokens observed", dir: "auto" }, clip(stretch.map((token) => token.text).join(""), PIECE)));
      continue;
    }
    turns++;
    if (labeled) out.push(h("div", { class: "turn" }, `turn ${turns}: ${plural(stretch.length, "token")} by `, clip([...new Set(stretch.map((token) => token.worker))].join(", "), 100)));
    out.push(turn(stretch, color));
    for (const [at, name, given] of g.calls ?? []) if (at === first.position) out.push(h("div", { class: "call", dir: "auto" }, h("b", {}, `calls ${clip(name, 100)}`), " ", h("code", {}, clip(given, 2000))));
  }
  if (g.cut) out.push(h("p", { class: "dim" }, `${g.cut} more tokens were not kept.`));
  return out;
}

function turn(tokens: Token[], color: (token: Token) => string): HTMLElement {
  const body = h("div", { class: "tokens", dir: "auto" });
  tokens.forEach((token, n) => {
    const before = tokens[n - 1];
    if (before && before.worker !== token.worker) body.append(h("span", { class: "move", title: `continued on ${token.worker}` }, `→ ${clip(token.worker, 40)}`));
    const title = `${token.worker || "?"}, version ${token.version}, log-prob ${token.logprob ?? "?"}`;
    body.append(h("span", { class: "token", style: `background:${color(token)}`, title }, visible(token.text === "" && n === tokens.length - 1 ? "∎" : clip(token.text, PIECE))));
  });
  return body;
}

const plural = (count: number, noun: string): string => `${count} ${noun}${count === 1 ? "" : "s"}`;
const hue = (n: number): string => (n < 0 ? "transparent" : `hsl(${(n * 137 + 205) % 360} 75% 55% / .35)`);
const likelihood = (logprob: number): string => `hsl(${Math.max(0, 120 + 30 * logprob)} 70% 50% / .38)`;
const visible = (text: string): string => (text === "\n" ? "↵\n" : text);

function spread<T>(runs: [T, number][]): T[] {
  const out: T[] = [];
  for (const [value, count] of runs) for (let n = 0; n < count && out.length < 100_000; n++) out.push(value);
  return out;
}
