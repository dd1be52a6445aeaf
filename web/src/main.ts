// The page: loads its data from the file or follows the server, and shows one tab at a time.

import { Chart, histogram, label, LEARNING, type X } from "./charts";
import { duration, h } from "./dom";
import { compare, money, now } from "./panels";
import { Responses } from "./responses";
import { Run, Samples } from "./run";
import { Timeline } from "./timeline";
import type { PageData, RunData } from "./types";

const TABS = ["Now", "Timeline", "Learning", "Money", "Responses", "Compare"] as const;
type Tab = (typeof TABS)[number];

class Page {
  runs: Run[];
  tab: Tab = "Now";
  updates = 0;
  private shown = 0; // the run that is shown in tabs for one run
  timeline: Timeline | null = null;
  private live: boolean;
  private responses: Responses | null = null;
  private charts: Chart[] = [];
  private main = h("main", {});
  private title = h("div", {});
  private tabs = h("nav", { role: "tablist" });
  private header = h("header", {}, this.title, this.tabs);
  private connection = "";
  private stream: EventSource | null = null;

  constructor(data: PageData) {
    this.live = data.live;
    const others = data.runs.map((run) => new Run(run));
    this.runs = this.live ? [new Run(), ...others] : others;
    document.getElementById("app")!.append(this.header, this.main, h("footer", {}, "Keys: 1–6 tabs, arrows and + – 0 in the timeline, m moves, j k c in responses, t light or dark"));
    document.addEventListener("keydown", (e) => this.key(e));
    window.addEventListener("hashchange", () => this.fromHash());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.refresh(); }); // what came while nobody looked
    const theme = remembered("theme");
    if (theme) document.documentElement.dataset.theme = theme;
    this.drawTabs();
    this.fromHash();
    if (this.live) this.connect(); else this.refresh();
  }

  private url = (path: string): string => `page/${path}${location.search}`;

  private connect(): void {
    const stream = (this.stream = new EventSource(this.url("stream")));
    stream.addEventListener("full", (e) => { this.runs[0]!.replace(parse(e)); this.connection = ""; this.changed(); });
    stream.addEventListener("changes", (e) => { if (!this.runs[0]!.history || !this.runs[0]!.apply(parse(e))) this.reconnect(0); else this.changed(); });
    stream.onerror = () => {
      const ended = this.runs[0]!.history && this.runs[0]!.status !== "running";
      this.connection = ended ? "the server has ended; this is the last state" : "connection lost; trying again";
      this.drawHeader();
      if (stream.readyState === EventSource.CLOSED) this.reconnect(5000);
    };
  }
  private reconnect(ms: number): void { this.stream?.close(); setTimeout(() => this.connect(), ms); }
  private changed(): void {
    this.updates++;
    if (document.hidden) return;
    this.refresh();
  }

  private fromHash(): void {
    const wanted = TABS.find((tab) => tab.toLowerCase() === location.hash.slice(1));
    if (wanted && wanted !== this.tab) this.open(wanted);
  }
  open(tab: Tab): void {
    this.tab = tab;
    history.replaceState(null, "", `#${tab.toLowerCase()}`);
    this.timeline = null; this.responses = null; this.charts = [];
    this.drawTabs();
    this.main.replaceChildren();
    this.refresh();
  }

  private refresh(): void {
    const run = this.runs[this.shown];
    this.drawHeader();
    if (!run?.history?.number) {
      const text = !run?.history ? "Waiting for the run …" : `This log has no events yet.${run.status === "killed" ? " No process writes to it: the run ended before it began." : ""}`;
      this.main.replaceChildren(h("p", { class: "dim" }, text));
      this.timeline = null; this.responses = null; this.charts = [];
      return;
    }
    document.title = `${run.name} · windfall`;
    if (this.tab === "Now") this.now(run);
    else if (this.tab === "Money") this.main.replaceChildren(money(run));
    else if (this.tab === "Timeline") {
      if (!this.timeline) { this.timeline = new Timeline(run); this.main.replaceChildren(this.timeline.element); }
      this.timeline.update();
    } else if (this.tab === "Responses") {
      if (this.responses) this.responses.update();
      else { this.responses = new Responses(run, new Samples(run, this.live && !this.shown ? this.url : null)); this.main.replaceChildren(this.responses.element); }
    } else this.plots(this.tab === "Learning" ? "step" : "t");
  }
  private now(run: Run): void {
    const [above, below] = now(run);
    if (this.timeline) { this.main.firstChild!.replaceWith(above); this.main.lastChild!.replaceWith(below); } else {
      this.charts = LEARNING.filter((s) => ["reward", "tok_per_s"].includes(s.column)).map((spec) => new Chart(spec, "step"));
      this.timeline = new Timeline(run, true);
      this.main.replaceChildren(above, h("div", { class: "grid" }, this.charts.map((c) => c.element)), this.timeline.element, below);
    }
    for (const chart of this.charts) chart.update([run]);
    this.timeline.update();
  }
  private plots(x: X): void {
    const runs = this.runs.filter((r) => r.history);
    if (!this.charts.length) {
      this.charts = (x === "step" ? LEARNING : LEARNING.filter((s) => ["reward", "tok_per_s", "workers", "length"].includes(s.column))).map((spec) => new Chart(spec, x));
    }
    const extra = x === "step" ? runs.flatMap((run) => run.policies.map((policy) => histogram(policy.data.staleness, label(policy, runs)))) : [];
    const head = x === "t" ? [compare(this.runs.filter((r) => r.history))] : [];
    const grid = h("div", { class: "grid" }, this.charts.map((c) => c.element), extra);
    this.main.replaceChildren(head.length ? h("div", { class: "beside" }, ...head, grid) : grid);
    for (const chart of this.charts) chart.update(runs);
  }

  private drawHeader(): void {
    if (this.title.contains(document.activeElement)) return; // a choice of runs is open
    const run = this.runs[this.shown], facts = run?.recipe ?? {};
    this.title.replaceChildren(
      h("div", { class: "title" }, this.runs.length > 1 ? this.choice() : h("h1", {}, run?.name || "windfall"), run?.status ? h("span", { class: `status ${run.status}` }, run.status) : null,
        run?.history ? h("span", { class: "dim" }, duration(run.end_s)) : null, facts.model ? h("span", { class: "dim" }, `${facts.model} on ${facts.env}, ${facts.algorithm}`) : null,
        this.connection ? h("span", { class: "bad" }, this.connection) : null));
  }
  private choice(): HTMLElement {
    const select = h("select", { "aria-label": "Run", change: () => { this.shown = select.selectedIndex; select.blur(); this.open(this.tab); } },
      this.runs.map((run, n) => h("option", { selected: n === this.shown }, run.name || "…")));
    return h("h1", {}, select);
  }
  private drawTabs(): void {
    const { tab } = this;
    this.tabs.replaceChildren(...TABS.map((name) => h("button", { role: "tab", "aria-selected": String(name === tab), class: name === tab ? "on" : undefined, click: () => this.open(name) }, name)),
      h("button", { title: "Light or dark (t)", "aria-label": "Light or dark", click: () => this.theme() }, "◐"));
    const on = this.tabs.querySelector<HTMLElement>(".on");
    if (on && this.tabs.scrollWidth > this.tabs.clientWidth) this.tabs.scrollLeft = on.offsetLeft - 60;
  }
  private theme(): void {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a file may have no storage */ }
    this.open(this.tab);
  }
  private key(e: KeyboardEvent): void {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target instanceof HTMLInputElement || e.target instanceof HTMLSelectElement) return;
    const tab = this.tab === "Timeline" && e.key === "0" ? undefined : TABS[Number(e.key) - 1];
    if (tab) this.open(tab);
    else if (e.key === "t") this.theme();
    else if (!((this.tab === "Timeline" && this.timeline?.key(e.key)) || this.responses?.key(e.key))) return;
    e.preventDefault();
  }
}

const parse = (e: Event): RunData => JSON.parse((e as MessageEvent<string>).data) as RunData;
function remembered(key: string): string | null { try { return localStorage.getItem(key); } catch { return null; } }

const page = new Page(JSON.parse(document.getElementById("data")!.textContent!) as PageData);
(window as unknown as { windfall: Page }).windfall = page; // for tests and for the curious
