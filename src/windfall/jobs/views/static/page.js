// The page of a service: its jobs, and one timeline for every device. No build step, no library.
// Rule: text always becomes a text node; nothing here parses markup.
"use strict";
(() => {
  const ROW = 26, AXIS = 20, LABEL = 150, POLL_MS = 1000, HIDDEN_MS = 10000, TIMEOUT_MS = 10000;
  const ENDED = ["done", "stopped", "failed", "over_budget"];
  const facts = JSON.parse(document.getElementById("data").textContent);
  const key = new URLSearchParams(location.search).get("key") ?? "";
  const names = new Map([[60, "1 min"], [600, "10 min"], [3600, "1 h"], [21600, "6 h"], [86400, "1 day"], [604800, "1 week"]]);

  function h(tag, props = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (value === undefined || value === false) continue;
      if (typeof value === "function") element.addEventListener(name, value);
      else if (name === "color") element.style.background = value;
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat()) {
      if (child === null || child === undefined) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }
  const number = (value) => (Number.isFinite(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : "–");
  const dollars = (value) => `$${(value ?? 0).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  const percent = (part) => (part > 0 && part < 0.005 ? "<1 %" : `${Math.round(part * 100)} %`);
  function duration(seconds) {
    if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
    const s = Math.max(0, Math.floor(seconds)), m = Math.floor(s / 60), two = (x) => String(x).padStart(2, "0");
    return s < 60 ? `${s} s` : m < 60 ? `${m} m ${two(s % 60)} s` : m < 1440 ? `${Math.floor(m / 60)} h ${two(m % 60)} m` : `${Math.floor(m / 1440)} d ${two(Math.floor(m / 60) % 24)} h`;
  }

  // What was received.
  const state = { window: facts.windows[1], life: "", changed: 0, now: 0, snapshot: null, rows: new Map(), selected: "", error: "", updates: 0, drawn: 0, drawMs: 0 };
  window.windfallJobs = state; // for tests
  const colors = new Map();
  function color(job) { // hues a golden angle apart: neighbors in the table differ most
    if (!colors.has(job)) { const n = colors.size; colors.set(job, `hsl(${(210 + n * 137.508) % 360} ${n % 2 ? 55 : 75}% ${[50, 42, 60][n % 3]}%)`); }
    return colors.get(job);
  }

  // Elements that stay.
  const status = h("span", { class: "dim", role: "status" }), bill = h("span", { class: "dim" });
  const body = h("tbody"), none = h("p", { class: "dim", hidden: true }, "No job was submitted yet: windfall train recipe.toml --on URL");
  const canvas = h("canvas", { tabindex: 0, "aria-label": "Timelines of devices. Keys 1 to 6 choose how much time is shown." });
  const tip = h("div", { class: "tip", hidden: true });
  const windows = facts.windows.map((w) => h("button", { click: () => choose(w) }, names.get(w) ?? duration(w)));
  const heads = ["job", "state", "share", "step", "tokens/s", "time left", "device time", "bill", "note"], numeric = [2, 3, 4, 5, 6, 7];
  const table = h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, n) => h("th", { class: numeric.includes(n) ? "num" : undefined }, text)))), body);
  document.getElementById("app").append(
    h("header", {}, h("h1", {}, "windfall jobs"), status, bill),
    h("main", {},
      h("div", { class: "bar" }, h("h2", {}, "Devices"), windows, h("span", { class: "key" }, h("i"), "trains"), h("span", { class: "key" }, h("i", { class: "light" }), "generates")),
      h("div", { class: "timeline" }, canvas), h("h2", {}, "Jobs"), h("div", { class: "scroll" }, table), none), tip);

  function choose(window_s) {
    Object.assign(state, { window: window_s, changed: 0 });
    state.rows.clear();
    draw();
    poll();
  }
  function select(job) { state.selected = state.selected === job ? "" : job; show(); draw(); }

  // Receiving.
  let asked = 0, timer = 0;
  async function poll() {
    const mine = ++asked; // an answer to an older question is not used
    clearTimeout(timer);
    try {
      const query = new URLSearchParams({ key, window: state.window, since: state.changed, life: state.life });
      const answer = await fetch(`page/data?${query}`, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
      if (!answer.ok) throw new Error(`the service answers with status ${answer.status}`);
      const data = await answer.json();
      if (mine !== asked) return;
      if (data.life !== state.life) state.rows.clear();
      for (const [device, buckets] of Object.entries(data.devices)) {
        if (!state.rows.has(device)) state.rows.set(device, new Map());
        const row = state.rows.get(device);
        for (const [n, parts] of Object.entries(buckets)) row.set(Number(n), parts);
        const oldest = data.now_s / (state.window / facts.buckets) - facts.buckets - 1;
        for (const n of row.keys()) if (n < oldest) row.delete(n);
      }
      Object.assign(state, { life: data.life, changed: data.changed, now: data.now_s, snapshot: data.snapshot, error: "" });
      state.updates++;
    } catch (e) {
      if (mine !== asked) return;
      state.error = `no answer from the service (${e.message}); trying again`;
    }
    timer = setTimeout(poll, document.hidden ? HIDDEN_MS : POLL_MS);
    show();
    draw();
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

  // The table. A row is kept while its job is there, so that selecting text and focus survive updates.
  const rows = new Map();
  function show() {
    const { jobs = {}, devices = {}, bill: sum, time_s: time } = state.snapshot ?? {};
    const entries = Object.entries(jobs), old = state.now - time > 5;
    const counts = new Map();
    for (const [, job] of entries) counts.set(job.state, (counts.get(job.state) ?? 0) + 1);
    status.className = state.error || old ? "bad" : "dim";
    status.textContent = state.error || (old ? `the service has written nothing for ${duration(state.now - time)}` : [...counts].map(([name, n]) => `${n} ${name.replace("_", " ")}`).join(", "));
    bill.textContent = sum ? `bill ${dollars(sum.usd)}, of which ${dollars(sum.idle_usd)} idle${sum.removed_usd ? `, ${dollars(sum.removed_usd)} of removed jobs` : ""}` : "";
    none.hidden = entries.length > 0 || !state.snapshot;
    windows.forEach((button, n) => button.classList.toggle("on", facts.windows[n] === state.window));
    for (const [name] of entries) color(name); // by submission, so colors stay
    entries.sort(([, a], [, b]) => Number(ENDED.includes(a.state)) - Number(ENDED.includes(b.state)));
    for (const name of [...rows.keys()]) if (!(name in jobs)) { rows.get(name).remove(); rows.delete(name); }
    entries.forEach(([name, job], n) => {
      const used = Object.values(devices).reduce((total, d) => total + (d.used_s?.[name] ?? 0), 0), running = job.state === "running";
      const cells = [
        null, null, `${job.share}${job.priority ? ` (priority ${job.priority})` : ""}`, `${job.step} / ${job.steps}`,
        running ? number(job.tokens_per_s) : "–", running ? duration(job.eta_s) : "–", used ? duration(used) : "–",
        dollars(job.usd) + (job.max_usd ? ` of ${dollars(job.max_usd)}` : ""), job.reason || job.waiting_for || "",
      ];
      let row = rows.get(name);
      if (!row) {
        const click = () => select(name);
        row = h("tr", { tabindex: 0, click, keydown: (e) => { if (e.key === "Enter") click(); } },
          h("td", {}, h("i", { color: color(name) }), name), h("td", {}, h("span")),
          cells.slice(2).map((_, n) => h("td", { class: numeric.includes(n + 2) ? "num" : "text" })));
        rows.set(name, row);
      }
      row.setAttribute("aria-selected", String(state.selected === name));
      const badge = row.children[1].firstChild;
      badge.className = `state ${job.state}`;
      cells[1] = job.state.replace("_", " ");
      if (badge.textContent !== cells[1]) badge.textContent = cells[1];
      for (let c = 2; c < cells.length; c++) if (row.children[c].textContent !== cells[c]) row.children[c].textContent = cells[c];
      if (body.children[n] !== row) body.insertBefore(row, body.children[n] ?? null);
    });
  }

  // The timelines: in each slice of time, one above the other, the share of every job.
  const deviceNames = () => [...new Set([...Object.keys(state.snapshot?.devices ?? {}), ...state.rows.keys()])].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const axisStep = (span) => [10, 60, 120, 600, 3600, 14400, 86400].find((s) => span / s <= 8) ?? 86400;
  let scheduled = false;
  function draw() { if (!scheduled) { scheduled = true; requestAnimationFrame(paint); } }
  function paint() {
    scheduled = false;
    const began = performance.now(), devices = deviceNames(), ratio = window.devicePixelRatio || 1;
    const wide = canvas.parentElement.clientWidth, high = Math.max(1, devices.length) * ROW + AXIS, label = Math.min(LABEL, wide / 3);
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio); canvas.height = Math.round(high * ratio); canvas.style.height = `${high}px`;
    }
    const c = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink"), dim = style.getPropertyValue("--dim"), line = style.getPropertyValue("--line");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, wide, high);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    const each = (wide - label) / facts.buckets, bucket = state.window / facts.buckets, newest = Math.floor(state.now / bucket);
    devices.forEach((device, n) => {
      const top = n * ROW, held = state.snapshot?.devices?.[device] ?? {};
      if (held.job) { c.fillStyle = color(held.job); c.fillRect(6, top + ROW / 2 - 4, 8, 8); }
      c.fillStyle = held.job ? ink : dim;
      c.fillText(device, 20, top + ROW / 2, label - 26);
      c.fillStyle = line;
      c.fillRect(0, top + ROW - 1, wide, 1);
      for (const [at, parts] of state.rows.get(device) ?? []) {
        const x = label + (at - newest + facts.buckets - 1) * each;
        if (x < label - 0.01 || x > wide) continue;
        const total = Math.max(1, parts.reduce((sum, part) => sum + part[2], 0)); // more than 1: two jobs beside each other
        let y = top + ROW - 2;
        for (const [job, kind, share] of parts) {
          const tall = (share / total) * (ROW - 4);
          c.globalAlpha = (kind === "train" ? 1 : 0.45) * (state.selected && state.selected !== job ? 0.2 : 1);
          c.fillStyle = color(job);
          c.fillRect(x, y - tall, Math.max(each, 0.5) + 0.3, tall);
          y -= tall;
        }
      }
      c.globalAlpha = 1;
    });
    c.fillStyle = dim;
    const step = axisStep(state.window);
    c.textAlign = "center";
    for (let ago = 0; ago <= state.window; ago += step) {
      const x = wide - (ago / state.window) * (wide - label), text = ago ? `-${duration(ago).replace(/ 00 [sm]$/, "").replace(" 00 h", "")}` : "now";
      c.fillRect(x, devices.length * ROW, 1, 4);
      c.fillText(text, Math.min(Math.max(x, label + 14), wide - 16), devices.length * ROW + 12);
    }
    c.textAlign = "left";
    state.drawn++;
    state.drawMs = performance.now() - began;
  }
  new ResizeObserver(draw).observe(canvas.parentElement);

  canvas.addEventListener("pointermove", (e) => {
    const box = canvas.getBoundingClientRect(), devices = deviceNames(), device = devices[Math.floor((e.clientY - box.top) / ROW)];
    const label = Math.min(LABEL, box.width / 3), bucket = state.window / facts.buckets;
    const n = Math.floor((e.clientX - box.left - label) / ((box.width - label) / facts.buckets));
    tip.hidden = device === undefined || n < 0;
    if (tip.hidden) return;
    const at = Math.floor(state.now / bucket) - facts.buckets + 1 + n, parts = state.rows.get(device)?.get(at) ?? [];
    const lines = parts.map(([job, kind, share]) => `${job} ${kind === "train" ? "trains" : "generates"}: ${percent(share)}`);
    tip.textContent = [`${device}, ${new Date(at * bucket * 1000).toLocaleString()}`, ...(lines.length ? lines : ["idle"])].join("\n");
    tip.style.left = `${Math.min(e.clientX + 14, innerWidth - 270)}px`;
    tip.style.top = `${Math.min(e.clientY + 14, innerHeight - 30 - 22 * (lines.length + 1))}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  document.addEventListener("keydown", (e) => {
    const window_s = facts.windows[Number(e.key) - 1];
    if (window_s && !e.ctrlKey && !e.metaKey && !e.altKey) choose(window_s);
  });
  poll();
})();
