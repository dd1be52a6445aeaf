// Browse sampled responses; tokens are colored by worker, version or log-prob.

import { clip, h, number } from "./dom";
import type { Run, Samples } from "./run";
import type { Sample, SampleHead } from "./types";

type Coloring = "worker" | "version" | "log-prob";
const PIECE = 20_000; // characters of one token that are shown

export class Responses {
  readonly element: HTMLElement;
  private list: SampleHead[] = [];
  private shown: SampleHead[] = [];
  private chosen = -1;
  private sample: Sample | null = null;
  private coloring: Coloring = "worker";
  private sort = "newest"; private filter = "";
  private rows = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Responses" });
  private detail = h("div", { class: "detail" });

  constructor(private run: Run, private samples: Samples) {
    const select = h("select", { "aria-label": "Order", change: () => { this.sort = select.value; this.show(); } },
      ["newest", "highest reward", "lowest reward", "longest", "shortest", "moved first", "task"].map((text) => h("option", {}, text)));
    const input = h("input", { type: "search", placeholder: "task, id or step", "aria-label": "Filter", input: () => { this.filter = input.value; this.show(); } });
    this.element = h("section", { class: "responses" }, h("div", {}, h("div", { class: "bar" }, select, input, h("button", { click: () => void this.load() }, "reload")), this.rows), this.detail);
    void this.load();
  }

  async load(): Promise<void> {
    this.list = await this.samples.list();
    this.show();
    if (this.chosen < 0 && this.shown[0]) await this.choose(0);
  }
  key(key: string): boolean {
    if (key === "j" || key === "ArrowDown") void this.choose(this.chosen + 1);
    else if (key === "k" || key === "ArrowUp") void this.choose(this.chosen - 1);
    else if (key === "c") { this.coloring = this.coloring === "worker" ? "version" : this.coloring === "version" ? "log-prob" : "worker"; this.render(); }
    else return false;
    return true;
  }

  private show(): void {
    const orders: Record<string, (a: SampleHead, b: SampleHead) => number> = {
      newest: (a, b) => b.step - a.step, "highest reward": (a, b) => (b.reward ?? -1e9) - (a.reward ?? -1e9), "lowest reward": (a, b) => (a.reward ?? 1e9) - (b.reward ?? 1e9),
      longest: (a, b) => b.length - a.length, shortest: (a, b) => a.length - b.length, "moved first": (a, b) => Number(b.moved) - Number(a.moved) || b.step - a.step, task: (a, b) => a.task.localeCompare(b.task),
    };
    const text = this.filter.toLowerCase();
    this.shown = this.list.filter((s) => !text || `${s.task} ${s.id} ${s.step}`.toLowerCase().includes(text)).sort(orders[this.sort]!).slice(0, 400);
    this.rows.replaceChildren(...this.shown.map((s, n) => h("button", { role: "option", class: "item", click: () => void this.choose(n) },
      h("b", {}, number(s.reward)), h("span", {}, `step ${s.step}`), h("span", {}, `${s.length} tok`), h("span", { class: "dim" }, clip(s.task, 40)), s.moved ? h("span", { class: "moved" }, "moved") : null)));
    if (!this.list.length) {
      const off = Number(this.run.recipe.samples ?? 1) === 0;
      this.rows.replaceChildren(h("p", { class: "dim" }, off ? "This run keeps no responses (log.samples = 0)." : "No responses yet: the first ones come with the first step."));
    }
  }
  private async choose(n: number): Promise<void> {
    const head = this.shown[n];
    if (!head) return;
    this.chosen = n;
    [...this.rows.children].forEach((row, m) => row.setAttribute("aria-selected", String(m === n)));
    this.rows.children[n]?.scrollIntoView({ block: "nearest" });
    this.sample = await this.samples.get(head.at ?? -1);
    this.render();
  }
  private render(): void {
    const s = this.sample;
    if (!s) return;
    const workers = spread(s.workers), versions = spread(s.versions), names = [...new Set(s.workers.map(([w]) => w).filter(Boolean))], numbers = [...new Set(s.versions.map(([v]) => v).filter((v) => v >= 0))].sort((a, b) => a - b);
    const color = (n: number): string => {
      if ((versions[n] ?? 0) < 0) return "";
      if (this.coloring === "worker") return hue(names.indexOf(workers[n] ?? ""));
      if (this.coloring === "version") return hue(numbers.indexOf(versions[n] ?? 0));
      return `hsl(${Math.max(0, 120 + 30 * (s.logprobs[n] ?? 0))} 70% 50% / .38)`;
    };
    const body = h("div", { class: "tokens", dir: "auto" });
    s.tokens.forEach((text, n) => {
      const observed = (versions[n] ?? 0) < 0, moved = n > 0 && !observed && workers[n] !== workers[n - 1] && workers[n] && workers[n - 1];
      if (moved) body.append(h("span", { class: "move", title: `continued on ${workers[n]}` }, `→ ${clip(workers[n]!, 40)}`));
      const title = observed ? "from the environment" : `${workers[n] || "?"}, version ${versions[n]}, log-prob ${s.logprobs[n]}`;
      body.append(h("span", { class: observed ? "observed" : "token", style: `background:${color(n)}`, title }, visible(text === "" && n === s.tokens.length - 1 ? "∎" : clip(text, PIECE))));
    });
    const buttons = (["worker", "version", "log-prob"] as const).map((c) => h("button", { class: c === this.coloring ? "on" : undefined, click: () => { this.coloring = c; this.render(); } }, c));
    const keys = this.coloring === "log-prob" ? [["likely", hslKey(0)], ["unlikely", hslKey(-4)]] : this.coloring === "worker" ? names.map((w, n) => [w, hue(n)]) : numbers.map((v, n) => [`version ${v}`, hue(n)]);
    this.detail.replaceChildren(
      h("div", { class: "bar" }, "color by ", buttons, h("div", { class: "legend" }, keys.map(([text, c]) => h("span", { class: "key" }, h("i", { style: `background:${c}` }), clip(text!, 40))))),
      h("p", { class: "dim" }, `reward ${number(s.reward)}, ${s.length} tokens, ${s.turns} ${s.turns === 1 ? "turn" : "turns"}, step ${s.step}, ended by ${s.finish === "stop" ? "a stop token" : "the length limit"}; `, clip(`${s.task}, response ${s.id}`, 200)),
      h("div", { class: "prompt", dir: "auto" }, clip(s.prompt, PIECE)), body, s.cut ? h("p", { class: "dim" }, `${s.cut} more tokens were not kept.`) : "");
  }
}

const hue = (n: number): string => (n < 0 ? "transparent" : `hsl(${(n * 137 + 205) % 360} 75% 55% / .35)`);
const hslKey = (logprob: number): string => `hsl(${Math.max(0, 120 + 30 * logprob)} 70% 50% / .38)`;
const visible = (text: string): string => (text === "\n" ? "↵\n" : text);

function spread<T>(runs: [T, number][]): T[] {
  const out: T[] = [];
  for (const [value, count] of runs) for (let n = 0; n < count && out.length < 100_000; n++) out.push(value);
  return out;
}
