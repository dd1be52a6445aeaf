// Line charts of series, one line per run.

import uPlot from "uplot";
import { h, number } from "./dom";
import type { Run } from "./run";

export const RUN_COLORS = ["#3b82f6", "#f97316", "#16a34a", "#db2777", "#7c3aed", "#0891b2", "#ca8a04", "#dc2626"];
export type X = "step" | "t";
interface Spec { title: string; column: string; unit?: string; more?: string; evals?: boolean }
export const LEARNING: Spec[] = [
  { title: "reward", column: "reward", evals: true }, { title: "response length", column: "length", unit: "tokens" },
  { title: "entropy", column: "entropy", unit: "nats" }, { title: "gradient norm", column: "grad_norm" },
  { title: "log-prob disagreement of engine and trainer", column: "engine_gap", unit: "nats" },
  { title: "staleness (mean, max)", column: "staleness_mean", more: "staleness_max", unit: "versions" },
  { title: "throughput", column: "tok_per_s", unit: "tok/s" }, { title: "workers", column: "workers" },
];

export class Chart {
  readonly element = h("figure", { class: "chart" });
  private plot: uPlot | null = null;
  private key = "";
  constructor(private spec: Spec, private x: X) { new ResizeObserver(() => this.resize()).observe(this.element); }

  update(runs: Run[]): void {
    const { spec } = this, tables: uPlot.AlignedData[] = [], lines: uPlot.Series[] = [{ label: this.x === "step" ? "step" : "hours" }];
    runs.forEach((run, n) => {
      const color = RUN_COLORS[n % RUN_COLORS.length]!, name = runs.length > 1 ? run.name : spec.column.replaceAll("_", " ");
      const xs = run.column(this.x).map((v) => (this.x === "t" ? (v ?? 0) / 3600 : v ?? 0));
      const columns = [run.column(spec.column)];
      lines.push({ label: name, stroke: color, width: 1.6, spanGaps: true, points: { show: xs.length < 2 } });
      if (spec.more) { columns.push(run.column(spec.more)); lines.push({ label: `${name}, max`, stroke: color, dash: [3, 3], spanGaps: true, points: { show: false } }); }
      if (xs.length) tables.push([xs, ...columns] as uPlot.AlignedData); else tables.push([[], ...columns.map(() => [])] as uPlot.AlignedData);
      if (spec.evals) {
        const evals = run.history.evals;
        tables.push([evals.map((e) => (this.x === "step" ? e[0] : e[1] / 3600)), evals.map((e) => e[2])] as uPlot.AlignedData);
        lines.push({ label: `${runs.length > 1 ? `${run.name}, ` : ""}held-out`, stroke: color, paths: () => null, points: { show: true, size: 9, fill: color } });
      }
    });
    const values = tables.some((t) => t.slice(1).some((c) => (c as (number | null)[]).some((v) => v !== null)));
    this.element.hidden = !values;
    if (!values) return;
    const data = uPlot.join(tables), key = lines.map((l) => l.label).join("|") + document.documentElement.dataset.theme;
    if (this.plot && this.key === key) { this.plot.setData(data); this.showLast(this.plot); return; }
    this.key = key;
    this.plot?.destroy();
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--dim"), line = getComputedStyle(document.documentElement).getPropertyValue("--line");
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    this.element.replaceChildren(h("figcaption", {}, spec.title, spec.unit ? h("span", { class: "dim" }, ` (${spec.unit})`) : null));
    this.plot = new uPlot({
      width: this.width, height: 190, series: lines, scales: { x: { time: false } }, cursor: { sync: { key: this.x } }, legend: { live: true },
      axes: [axis, { ...axis, size: 58, values: (_: uPlot, ticks: number[]) => ticks.map((v) => number(v)) }],
      hooks: { setCursor: [(plot: uPlot) => { if (plot.cursor.idx === null || plot.cursor.idx === undefined) this.showLast(plot); }] },
    }, data, this.element);
    this.showLast(this.plot);
  }
  // The legend has the last values while nothing is pointed at.
  private showLast(plot: uPlot): void { plot.setLegend({ idx: plot.data[0].length - 1 }); }
  private get width(): number { return Math.max(200, this.element.clientWidth - 8); }
  private resize(): void { if (this.plot && this.element.clientWidth) this.plot.setSize({ width: this.width, height: 190 }); }
}

export function histogram(counts: number[], name: string): HTMLElement {
  const most = Math.max(1, ...counts), all = counts.reduce((a, b) => a + b, 0) || 1;
  return h("figure", { class: "chart" }, h("figcaption", {}, "staleness of trained responses", name ? h("span", { class: "dim" }, ` (${name})`) : null),
    counts.length ? counts.map((count, n) => h("div", { class: "hist" }, h("span", { class: "num" }, n), h("i", { style: `width:${(70 * count) / most}%` }), h("span", {}, `${((100 * count) / all).toFixed(1)} %`)))
      : h("p", { class: "dim" }, "Every response was trained on with the version that generated it."));
}
