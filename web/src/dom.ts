// Elements and formats. Text always becomes a text node: nothing here parses markup.

import type { Evaluation } from "./types";

type Child = Node | string | number | null | undefined | false;
type Props = Record<string, string | number | boolean | ((event: never) => void) | undefined>;

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: (Child | Child[])[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value as EventListener);
    else if (key === "style") element.style.cssText = String(value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size > 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 100 || Number.isInteger(value)) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

// How many responses of an evaluation were graded, if rewards are missing.
export const graded = (e: Evaluation): string => (e[3] !== null && e[3] !== e[4] ? ` (${number(e[3])} of ${number(e[4])} responses graded)` : "");

export function dollars(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "$0";
  if (value < 0.0001) return "< $0.0001";
  const digits = value < 1 ? 4 : 2;
  return `$${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
}

export function duration(seconds: number): string {
  const s = Math.max(0, Math.round(seconds * 10) / 10);
  if (s < 60) return `${s % 1 ? s.toFixed(1) : s} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m} m ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  return `${Math.floor(m / 60)} h ${String(m % 60).padStart(2, "0")} m`;
}

// A time on an axis, without parts that are 0.
export function moment(seconds: number): string {
  const s = Math.round(seconds * 10) / 10, parts = [[Math.floor(s / 3600), "h"], [Math.floor(s / 60) % 60, "m"], [Math.round((s % 60) * 10) / 10, "s"]] as const;
  return parts.filter(([count]) => count).map(([count, unit]) => `${count} ${unit}`).join(" ") || "0";
}

export const clip = (text: string, most: number): string => (text.length > most ? `${text.slice(0, most)}… (${text.length - most} more)` : text);

export function table(head: string[], rows: (Child | Child[])[][], numeric: number[] = [], style = ""): HTMLElement {
  const cell = (tag: "td" | "th", content: Child | Child[], n: number) => h(tag, { class: numeric.includes(n) ? "num" : undefined }, content as Child);
  return h("div", { class: "scroll" }, h("table", { class: style || undefined },
    h("thead", {}, h("tr", {}, head.map((text, n) => cell("th", text, n)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((content, n) => cell("td", content, n)))))));
}

export function card(label: string, value: Child, note: Child = ""): HTMLElement {
  return h("div", { class: "card" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), note ? h("div", { class: "note" }, note) : null);
}
