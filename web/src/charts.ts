// Line charts of series, one line per run, or per policy of a run.

import uPlot from "uplot";
import { graded, h, number } from "./dom";
import type { Policy, Run } from "./run";
import type { Column } from "./types";

export const RUN_COLORS = ["#3b82f6", "#f97316", "#16a34a", "#db2777", "#7c3aed", "#0891b2", "#ca8a04", "#dc2626"];
export type X = "step" | "t";
// `whole`: policies have it in common.
interface Spec { title: string; column: string; unit?: string; more?: string; evals?: boolean; whole?: boolean }
export const LEARNING: Spec[] = [
  { title: "reward", column: "reward", evals: true }, { title: "response length", column: "length", unit: "tokens" },
  { title: "entropy", column: "entropy", unit: "nats" }, { title: "gradient norm", column: "grad_norm" },
  { title: "log-prob disagreement of engine and trainer", column: "engine_gap", unit: "nats" },
  { title: "staleness (mean, max)", column: "staleness_mean", more: "staleness_max", unit: "versions" },
  { title: "throughput", column: "tok_per_s", unit: "tok/s", whole: true }, { title: "workers", column: "workers", whole: true },
];
const HEIGHT = 180;
const INTEGERS = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((power) => n * 10 ** power)).sort((a, b) => a - b);

export class Chart {
  readonly element = h("figure", { class: "chart" });
  private plot: uPlot | null = null;
  private key = "";
  constructor(private spec: Spec, private x: X) { new ResizeObserver(() => this.resize()).observe(this.element); }

  update(runs: Run[]): void {
    const { spec } = this, [unit, scale] = this.unit(runs), all = runs.flatMap((run) => run.policies), policies = spec.whole ? runs.map((run) => run.lead) : all;
    const tables: uPlot.AlignedData[] = [], lines: uPlot.Series[] = [{ label: unit, value: (_, v) => number(v) }];
    const has = (column: Column): boolean => column.some((v) => v !== null);
    policies.forEach((policy) => {
      const { evals } = policy.data, several = policies.length > 1, title = spec.whole ? policy.run.name : label(policy, runs);
      if (!has(policy.column(spec.column)) && !(spec.evals && evals.length)) return; // such as a simulation, which learns nothing
      const color = RUN_COLORS[all.indexOf(policy) % RUN_COLORS.length]!, name = several ? title : spec.more ? "mean" : spec.unit ?? spec.title;
      const xs = policy.column(this.x).map((v) => (v ?? 0) / scale), columns = [policy.column(spec.column)];
      lines.push({ label: name, stroke: color, width: 1.6, spanGaps: true, points: { show: xs.length < 2 }, value: shownValue });
      if (spec.more) { columns.push(policy.column(spec.more)); lines.push({ label: several ? `${name}, max` : "max", stroke: color, dash: [3, 3], spanGaps: true, points: { show: false }, value: shownValue }); }
      tables.push([xs, ...columns] as uPlot.AlignedData);
      if (spec.evals && evals.length) {
        const at = evals.map((e) => (this.x === "step" ? e[0] : e[1]) / scale);
        // The legend says how many responses were graded in the evaluation that it shows.
        const value = (plot: uPlot, v: number | null | undefined, series: number, index: number | null): string => {
          const shown = evals[at.findLastIndex((x) => x <= (plot.data[0][index ?? -1] ?? -Infinity))];
          return shownValue(plot, v, series, index) + (shown ? graded(shown) : "");
        };
        tables.push([at, evals.map((e) => e[2])] as uPlot.AlignedData);
        lines.push({ label: `${several ? `${title}, ` : ""}held-out`, stroke: color, paths: () => null, points: { show: true, size: 9, fill: color }, value });
      }
    });
    this.element.hidden = !tables.length;
    if (!tables.length) return;
    const data = uPlot.join(tables), key = lines.map((l) => l.label).join("|") + document.documentElement.dataset.theme;
    if (this.plot && this.key === key) { this.plot.setData(data); this.showLast(this.plot); return; }
    this.key = key;
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement), line = style.getPropertyValue("--line"), font = "12px system-ui, sans-serif";
    const axis = { stroke: style.getPropertyValue("--dim"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 }, font };
    this.element.replaceChildren(h("figcaption", {}, spec.title, spec.unit ? h("span", { class: "dim" }, ` (${spec.unit})`) : null));
    this.plot = new uPlot({
      width: this.width, height: HEIGHT, series: lines, scales: { x: { time: false } }, cursor: { sync: { key: this.x } }, legend: { live: true }, padding: [8, 12, 0, 0],
      axes: [{ ...axis, size: 28, ...(this.x === "step" ? { incrs: INTEGERS } : {}) }, { ...axis, size: 52, values: (_: uPlot, ticks: number[]) => ticks.map((v) => number(v)) }],
      hooks: { setCursor: [(plot: uPlot) => { if (plot.cursor.idx === null || plot.cursor.idx === undefined) this.showLast(plot); }] },
    }, data, this.element);
    this.showLast(this.plot);
  }
  // What the horizontal axis counts: steps, or a unit of time in which the longest run is a readable number.
  private unit(runs: Run[]): [string, number] {
    if (this.x === "step") return ["step", 1];
    const longest = Math.max(...runs.map((run) => run.end_s));
    return longest >= 7200 ? ["hours", 3600] : longest >= 120 ? ["minutes", 60] : ["seconds", 1];
  }
  // The legend has the last values while nothing is pointed at.
  private showLast(plot: uPlot): void { plot.setLegend({ idx: plot.data[0].length - 1 }); }
  private get width(): number { return Math.max(200, this.element.clientWidth - 16); }
  private resize(): void { if (this.plot && this.element.clientWidth) this.plot.setSize({ width: this.width, height: HEIGHT }); }
}

// The name of a policy's line: its own, that of its run, or both.
export const label = (policy: Policy, runs: Run[]): string => [runs.length > 1 ? policy.run.name : "", policy.name].filter(Boolean).join(", ");

// The value at this point, or the last one before it: evaluations are rare, and runs have their steps at different times.
function shownValue(plot: uPlot, value: number | null | undefined, series: number, index: number | null): string {
  for (let n = index ?? -1; (value === null || value === undefined) && n >= 0; n--) value = plot.data[series]?.[n];
  return number(value);
}

export function histogram(counts: number[], name: string): HTMLElement {
  const most = Math.max(1, ...counts), all = counts.reduce((a, b) => a + b, 0) || 1;
  return h("figure", { class: "chart" }, h("figcaption", {}, "staleness of trained responses", name ? h("span", { class: "dim" }, ` (${name})`) : null),
    counts.length ? counts.map((count, n) => h("div", { class: "hist" }, h("span", { class: "num" }, n), h("i", { style: `width:${(70 * count) / most}%` }), h("span", {}, `${((100 * count) / all).toFixed(1)} %`)))
      : h("p", { class: "dim" }, "Every response was trained on with the version that generated it."));
}
