// The timeline: one row per worker on a canvas. Only visible rows and changes are drawn.

import { clip, duration, h, moment } from "./dom";
import type { Row, Run } from "./run";

const ROW = 20, TALL = 34, HEAD = 40, LOST = 8; // heights in pixels: of a row among many, of one among few, of the axis
export const COLORS = ["transparent", "#a78bfa", "#38bdf8", "#22c55e", "#f59e0b", "#94a3b8", "#64748b", "#eab308", "#ef4444", "#6366f1", "#ec4899", "#14b8a6", "#fb7185", "#86efac"];
const STEPS_S = [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

export class Timeline {
  readonly element: HTMLElement;
  from = 0; to = 1; drawn = 0; drawMs = 0;
  private label = 110; // width of the names; a field, because inner loops read it
  row = ROW; // height of a row: few rows are taller
  private follow = true; arcs = false; private scheduled = false;
  private canvas = h("canvas", { tabindex: 0, "aria-label": "Timeline of workers. Arrow keys pan, plus and minus zoom, 0 shows everything, m shows moves." });
  private box = h("div", { class: "timeline" }, this.canvas);
  private tip = h("div", { class: "tip", hidden: true });
  private space = h("div", {});
  private pointers = new Map<number, { x: number; y: number }>();
  private share = new Float64Array(16);
  private arcsButton = h("button", { click: () => this.toggleArcs() }, "moves");

  // `small`: for an overview, without buttons and with fewer rows.
  constructor(private run: Run, private small = false) {
    const states = run.history?.states ?? [];
    const legend = states.map((name, n) => (n && n !== 6 ? h("span", { class: "key" }, h("i", { style: `background:${COLORS[n]}` }), name) : null));
    this.element = h("section", {},
      h("div", { class: "bar" }, small ? null : [h("button", { click: () => this.zoom(0.5), title: "Zoom in (+)" }, "+"), h("button", { click: () => this.zoom(2), title: "Zoom out (-)" }, "–"),
        h("button", { click: () => this.all(), title: "Show everything (0)" }, "all"), this.arcsButton], h("div", { class: "legend" }, legend)),
      this.box, this.tip);
    this.box.append(this.space);
    if (small) this.canvas.style.touchAction = "pan-y";
    this.box.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"] as const) this.canvas.addEventListener(name, (e) => this.pointer(e));
    this.canvas.addEventListener("dblclick", () => this.all());
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.all();
  }

  get end(): number { return Math.max(1, this.run.end_s); }
  toggleArcs(): void { this.arcs = !this.arcs; this.arcsButton.classList.toggle("on", this.arcs); this.draw(); }
  all(): void { this.follow = true; this.from = 0; this.to = this.end; this.draw(); }
  update(): void {
    if (this.follow) { const span = this.to - this.from; this.to = this.end; if (this.from > 0) this.from = this.to - span; }
    this.draw();
  }
  zoom(factor: number, around = (this.from + this.to) / 2): void {
    const span = Math.min(Math.max((this.to - this.from) * factor, 1), this.end * 1.05);
    const share = (around - this.from) / (this.to - this.from);
    this.move(around - span * share, span);
  }
  pan(share: number): void { const span = this.to - this.from; this.move(this.from + span * share, span); }
  private move(from: number, span: number): void {
    this.from = Math.max(0, Math.min(from, this.end - span));
    if (span >= this.end) this.from = 0;
    this.to = this.from + span;
    this.follow = this.to >= this.end;
    this.draw();
  }
  key(key: string): boolean {
    const actions: Record<string, () => void> = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.all(), m: () => this.toggleArcs(),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), ArrowUp: () => this.box.scrollBy(0, -3 * this.row), ArrowDown: () => this.box.scrollBy(0, 3 * this.row),
    };
    actions[key]?.();
    return key in actions;
  }

  private get width(): number { return this.box.clientWidth; }
  private x(seconds: number): number { return this.label + ((seconds - this.from) / (this.to - this.from)) * (this.width - this.label); }
  private seconds(x: number): number { return this.from + ((x - this.label) / (this.width - this.label)) * (this.to - this.from); }

  private wheel(e: WheelEvent): void {
    if (this.small && !e.ctrlKey) return; // it scrolls the page
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) { e.preventDefault(); this.pan((e.deltaX || e.deltaY) / 800); return; }
    if (!e.ctrlKey && !e.metaKey && e.offsetX < this.label) return;
    e.preventDefault();
    this.zoom(Math.exp(e.deltaY / 400), this.seconds(e.offsetX));
  }
  private pointer(e: PointerEvent): void {
    const here = { x: e.offsetX, y: e.offsetY };
    if (e.type === "pointerdown") { this.pointers.set(e.pointerId, here); this.canvas.setPointerCapture(e.pointerId); return; }
    if (e.type !== "pointermove") { this.pointers.delete(e.pointerId); if (e.type !== "pointerup") this.tip.hidden = true; return; }
    const before = this.pointers.get(e.pointerId);
    if (!before) { this.hover(here.x, here.y, e.clientX, e.clientY); return; }
    const other = [...this.pointers].find(([id]) => id !== e.pointerId)?.[1];
    if (other) this.zoom(Math.max(0.5, Math.min(2, Math.abs(before.x - other.x) / Math.max(8, Math.abs(here.x - other.x)))), this.seconds((here.x + other.x) / 2));
    else { this.pan((before.x - here.x) / (this.width - this.label)); if (e.pointerType === "touch") this.box.scrollBy(0, before.y - here.y); }
    this.pointers.set(e.pointerId, here);
  }
  private rowAt(y: number): Row | undefined { return y < HEAD ? undefined : this.run.rows[Math.floor((y - HEAD + this.box.scrollTop) / this.row)]; }

  private hover(x: number, y: number, clientX: number, clientY: number): void {
    const row = this.rowAt(y), t = this.seconds(x), n = row && x >= this.label ? row.at(t) : -1;
    this.tip.hidden = !row;
    if (!row) return;
    const lines = [h("b", {}, row.name)];
    if (n >= 0) {
      const until = n + 1 < row.length ? row.start(n + 1) : this.end;
      lines.push(h("div", {}, `${this.run.history.states[row.state(n)]} for ${duration(until - row.start(n))}, from ${duration(row.start(n))}`));
    }
    const { lease, device, usd_per_h: price, pid } = row.facts;
    if (lease) lines.push(h("div", { class: "dim" }, [lease, device, price ? `$${price}/h` : "", pid ? `process ${pid}` : ""].filter(Boolean).join(", ")));
    const near = this.run.history.problems.filter((p) => Math.abs(p.t - t) < (this.to - this.from) / 60 && String(p.worker ?? "").startsWith(row.name));
    for (const p of near.slice(-2)) lines.push(h("div", { class: "bad" }, `${p.name.replaceAll("_", " ")}: ${clip(String(p.why ?? ""), 160)}${p.moved ? `; ${p.moved} responses moved` : ""}`));
    this.tip.replaceChildren(...lines);
    this.tip.style.left = `${Math.min(clientX + 12, window.innerWidth - 320)}px`;
    this.tip.style.top = `${clientY + 14}px`;
  }

  draw(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => { this.scheduled = false; this.paint(); });
  }
  private paint(): void {
    const began = performance.now(), { canvas, box, run } = this, width = box.clientWidth, height = box.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    this.label = width < 600 ? 64 : 110;
    const room = (this.small ? 0.3 : 0.72) * window.innerHeight, count = run.rows.length;
    this.row = Math.round(Math.max(ROW, Math.min(this.small ? ROW + 4 : TALL, (room - HEAD - 8) / Math.max(1, count))));
    const row = this.row, wanted = `${Math.round(Math.max(80, Math.min(room, count * row + HEAD + 8)))}px`;
    if (box.style.height !== wanted) { box.style.height = wanted; this.draw(); return; }
    this.space.style.height = `${Math.max(0, count * row + HEAD - height)}px`;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    }
    const c = canvas.getContext("2d")!, style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink"), dim = style.getPropertyValue("--line");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "12px system-ui, sans-serif";
    this.axis(c, width, height, ink, dim);
    const first = Math.floor(box.scrollTop / row), last = Math.min(count, Math.ceil((box.scrollTop + height - HEAD) / row));
    c.save(); c.beginPath(); c.rect(0, HEAD, width, height - HEAD); c.clip();
    for (let n = first; n < last; n++) {
      const y = HEAD + n * row - box.scrollTop;
      this.bars(c, run.rows[n]!, y, width);
      c.fillStyle = ink;
      c.fillText(clip(run.rows[n]!.name.replace("trainer ", ""), 15).slice(0, 16), 4, y + row / 2 + 4, this.label - 8);
    }
    if (this.arcs) this.paintArcs(c);
    c.restore();
    this.drawn++; this.drawMs = performance.now() - began;
  }
  private axis(c: CanvasRenderingContext2D, width: number, height: number, ink: string, dim: string): void {
    const step = STEPS_S.find((s) => (this.to - this.from) / s < (width - this.label) / 90) ?? 86400;
    c.strokeStyle = dim; c.fillStyle = ink; c.lineWidth = 1;
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = this.x(t), text = moment(t);
      c.strokeRect(x, 0, 0, height);
      if (x + 3 + c.measureText(text).width < width) c.fillText(text, x + 3, 14);
    }
    const ends = this.run.lead.column("t"), numbers = this.run.lead.column("step");
    let shown = 0;
    for (const t of ends) if (t !== null && t >= this.from && t <= this.to) shown++;
    if (!shown || (width - this.label) / shown <= 5) return;
    c.strokeStyle = "#6366f199"; c.fillStyle = "#6366f1"; c.setLineDash([2, 3]); c.textAlign = "right";
    let free = this.label; // where the next number may begin
    ends.forEach((t, n) => {
      if (t === null || t < this.from || t > this.to) return;
      const x = this.x(t), text = shown < 12 ? `step ${numbers[n]}` : String(numbers[n]), from = x - 4 - c.measureText(text).width;
      c.strokeRect(x, HEAD - 20, 0, height);
      if (from > free) { c.fillText(text, x - 4, HEAD - 10); free = x; }
    });
    c.setLineDash([]); c.textAlign = "left";
  }
  // Every pixel has one state: the one that lasts longest in it, or a loss. Equal neighbors are one bar.
  private bars(c: CanvasRenderingContext2D, row: Row, y: number, width: number): void {
    const scale = (width - this.label) / (this.to - this.from), share = this.share.fill(0), height = this.row - 4;
    let pixel = this.label, barFrom = this.label, barState = 0;
    const flush = (at: number, state: number) => {
      if (state === barState) return;
      if (barState) { c.fillStyle = COLORS[barState]!; c.fillRect(barFrom, y + 2, at - barFrom, height); }
      barFrom = at; barState = state;
    };
    const close = () => {
      let best = 0;
      for (let s = 1; s < share.length; s++) if (share[s]! > share[best]!) best = s;
      flush(pixel, share[LOST]! > 0 ? LOST : best);
      share.fill(0);
    };
    for (let n = Math.max(0, row.at(this.from)); n < row.length; n++) {
      const state = row.state(n), start = row.start(n);
      if (start > this.to) break;
      const end = n + 1 < row.length ? row.start(n + 1) : this.end;
      let a = Math.max(this.label, this.label + (start - this.from) * scale);
      const b = Math.min(width, this.label + (end - this.from) * scale);
      if (b <= a) continue;
      if (Math.floor(a) > pixel) { close(); pixel = Math.floor(a); }
      if (b >= pixel + 1) {
        share[state]! += pixel + 1 - a;
        close();
        a = pixel + 1;
        if (Math.floor(b) > a) flush(a, state);
        pixel = Math.floor(b);
      }
      share[state]! += b - Math.max(a, pixel);
    }
    close();
    flush(Math.min(width, pixel + 1), 0);
  }
  private paintArcs(c: CanvasRenderingContext2D): void {
    const place = new Map(this.run.rows.map((row, n) => [row.name, HEAD + n * this.row - this.box.scrollTop + this.row / 2]));
    const base = (name: string) => place.get(name) ?? place.get(name.replace(/[.#]\d+$/, ""));
    c.strokeStyle = "#f97316cc";
    for (const [t, source, target, count] of this.run.moves) {
      const a = base(source), b = base(target);
      if (t < this.from || t > this.to || a === undefined || b === undefined) continue;
      const x = this.x(t), bend = 10 + Math.min(40, Math.abs(a - b) / 3);
      c.lineWidth = 1 + Math.log10(1 + count); c.beginPath(); c.moveTo(x, a); c.bezierCurveTo(x + bend, a, x + bend, b, x, b); c.stroke();
      c.fillStyle = "#f97316"; c.beginPath(); c.arc(x, b, 2.5, 0, 7); c.fill();
    }
  }
}
