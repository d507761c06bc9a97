"use strict";

// ---- small tools ------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

// Text only ever goes in as text: nothing of a run is read as markup.
function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "path", "line", "text", "rect", "circle", "g", "clipPath", "defs", "title"];
  const node = drawn.includes(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (Math.abs(value) >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${place ? value.toPrecision(3) : value.toFixed(0)} ${units[place]}`;
}

function shown(value, unit = "") {
  if (value === null || value === undefined) return "none";
  if (unit === "B") return bytes(value);
  if (unit === "B/s") return `${bytes(value)}/s`;
  if (unit === "%") return `${value.toFixed(1)} %`;
  const size = Math.abs(value);
  let text = size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(3) : Number(value.toPrecision(5)).toLocaleString("en-US", { maximumFractionDigits: 7 });
  return unit ? `${text} ${unit}` : text;
}

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= raw);
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high + step * 1e-9; place += 1) found.push(Number((place * step).toPrecision(12)));
  return found;
}

function logTicks(low, high, most) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const part of [1, 2, 5]) {
      const value = part * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  const powers = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  const kept = found.length > most && powers.length > 1 ? powers : found;
  return kept.length > 1 ? kept : ticks(low, high, most);
}

// First place in a sorted list that is not below a value.
function place(list, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---- a chart ----------------------------------------------------------------------------------

let made = 0;

class Chart {
  // `page` has view(), look(from, to), marks, isLog(title), setLog(title, on), busy(on).
  constructor(spec, page) {
    this.spec = spec;
    this.page = page;
    this.clip = `clip-${(made += 1)}`;
    this.plot = make("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${spec.title}: arrow keys read the values` });
    const logs = spec.unit === "" && spec.series.every((one) => one.summary.low > 0);
    this.log = logs && page.isLog(spec.title);
    const head = make("div", { class: "chart-head" }, make("h3", {}, spec.unit && !["%", "B", "B/s"].includes(spec.unit) ? `${spec.title}, ${spec.unit}` : spec.title));
    if (logs) head.append(this.logButton());
    this.node = make("figure", { class: "chart card" }, head, this.plot, this.legend(), this.table());
    this.listen();
  }

  logButton() {
    const button = make("button", { type: "button", "aria-pressed": String(this.log) }, "log");
    button.addEventListener("click", () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", String(this.log));
      this.page.setLog(this.spec.title, this.log);
      this.draw();
    });
    return button;
  }

  legend() {
    if (this.spec.series.length < 2) return null;
    const items = this.spec.series.map((one, number) => make("li", {}, make("span", { class: "key", style: { background: this.colour(number) } }), one.name));
    return make("ul", { class: "legend" }, ...items);
  }

  table() {
    const rows = this.spec.series.map((one) => {
      const found = one.summary;
      const cells = [found.first, found.last, found.low, found.high].map((value) => make("td", { class: "num" }, shown(value, this.spec.unit)));
      return make("tr", {}, make("th", { scope: "row" }, one.name), ...cells);
    });
    const names = ["", "first", "last", "least", "greatest"].map((name) => make("th", { scope: "col", class: name && "num" }, name));
    const odd = this.spec.series.filter((one) => one.summary.not_finite);
    const notes = odd.map((one) => make("p", { class: "hint" }, `${one.name}: ${one.summary.not_finite} not finite, first at step ${one.summary.first_not_finite}.`));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...rows));
    return make("div", {}, ...notes, make("details", { "data-key": `numbers ${this.spec.title}` }, make("summary", {}, "Numbers"), make("div", { class: "wide" }, table)));
  }

  colour(number) { return `var(--c${number % 8})`; }

  draw() {
    const width = Math.max(200, this.plot.clientWidth);
    const height = width < 420 ? 168 : 200;
    this.box = { left: 54, right: width - 10, top: 10, bottom: height - 24 };
    const { left, right, top, bottom } = this.box;
    const [from, to] = this.page.view();
    const [low, high] = this.bounds(from, to);
    const level = this.log ? Math.log10 : (value) => value;
    this.x = (step) => left + ((step - from) / (to - from)) * (right - left);
    this.y = (value) => bottom - ((level(value) - level(low)) / (level(high) - level(low))) * (bottom - top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.words() });
    svg.append(make("defs", {}, make("clipPath", { id: this.clip }, make("rect", { x: left, y: top - 6, width: right - left, height: bottom - top + 10 }))));
    const levels = this.log ? logTicks(low, high, 6) : ticks(low, high, 4);
    for (const value of levels) {
      svg.append(make("line", { class: "grid", x1: left, x2: right, y1: this.y(value), y2: this.y(value) }));
      svg.append(make("text", { x: left - 8, y: this.y(value) + 4, "text-anchor": "end" }, this.tick(value)));
    }
    svg.append(make("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }));
    const steps = ticks(from, to, Math.max(4, Math.floor((right - left) / 70))).filter(Number.isInteger);
    for (const step of steps) svg.append(make("text", { x: this.x(step), y: bottom + 17, "text-anchor": this.x(step) > right - 24 ? "end" : "middle" }, step.toLocaleString("en-US")));
    const inside = make("g", { "clip-path": `url(#${this.clip})` });
    for (const mark of this.page.marks) {
      if (mark.step < from || mark.step > to) continue;
      inside.append(make("line", { class: `mark ${mark.kind}`, x1: this.x(mark.step), x2: this.x(mark.step), y1: top, y2: bottom }, make("title", {}, mark.text)));
    }
    this.spec.series.forEach((one, number) => this.trace(inside, one, number, from, to));
    this.cursor = make("g", {});
    svg.append(inside, this.cursor);
    this.plot.replaceChildren(svg);
    this.tip = null;
  }

  tick(value) {
    if (this.spec.unit === "%") return `${value} %`;
    if (this.spec.unit.startsWith("B")) return bytes(value).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential().replace("e+", "e");
    return value.toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  words() {
    const parts = this.spec.series.slice(0, 4).map((one) => `${one.name} from ${shown(one.summary.first, this.spec.unit)} to ${shown(one.summary.last, this.spec.unit)}`);
    return `${this.spec.title}: ${parts.join("; ")}`;
  }

  bounds(from, to) {
    let low = Infinity;
    let high = -Infinity;
    for (const one of this.spec.series) {
      const start = Math.max(0, place(one.x, from) - 1);
      const end = Math.min(one.x.length, place(one.x, to) + 1);
      for (let number = start; number < end; number += 1) {
        low = Math.min(low, (one.lo || one.y)[number]);
        high = Math.max(high, (one.hi || one.y)[number]);
      }
    }
    if (!(low <= high)) return this.log ? [1, 10] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (["%", "B", "B/s", "samples/s"].includes(this.spec.unit)) low = Math.min(0, low);
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const room = (high - low) * 0.08;
    return [low === 0 ? 0 : low - room, high + room];
  }

  trace(inside, one, number, from, to) {
    const start = Math.max(0, place(one.x, from) - 1);
    const end = Math.min(one.x.length, place(one.x, to) + 1);
    const colour = this.colour(number);
    const at = (list) => (place_) => `${this.x(one.x[place_]).toFixed(1)},${this.y(list[place_]).toFixed(1)}`;
    const numbers = Array.from({ length: Math.max(0, end - start) }, (_, offset) => start + offset);
    if (!numbers.length) return;
    if (one.lo && this.spec.series.length <= 3) {
      const outline = [...numbers.map(at(one.hi)), ...numbers.slice().reverse().map(at(one.lo))];
      inside.append(make("path", { class: "band", d: `M${outline.join("L")}Z`, style: { fill: colour } }));
    }
    const path = make("path", { class: "line", d: `M${numbers.map(at(one.y)).join("L")}`, style: { stroke: colour } });
    if (number >= 8) path.style.strokeDasharray = "5 3";
    inside.append(path);
    if (numbers.length <= 24) {
      for (const part of numbers) inside.append(make("circle", { cx: this.x(one.x[part]), cy: this.y(one.y[part]), r: 2.6, style: { fill: colour } }));
    }
  }

  // ---- reading and zooming

  listen() {
    let start = null;
    const here = (event) => Math.min(this.box.right, Math.max(this.box.left, event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        start = here(event);
        this.plot.setPointerCapture(event.pointerId);
      } else this.read(this.step(here(event)));
    });
    this.plot.addEventListener("pointermove", (event) => {
      this.page.busy(true);
      if (start === null) this.read(this.step(here(event)));
      else this.select(start, here(event));
    });
    const finish = (event) => {
      if (start === null) return;
      const [from, to] = [start, here(event)].sort((a, b) => a - b);
      start = null;
      if (event.type === "pointerup" && to - from > 6) this.page.look(Math.floor(this.step(from)), Math.ceil(this.step(to)));
      else this.read(null);
    };
    this.plot.addEventListener("pointerup", finish);
    this.plot.addEventListener("pointercancel", finish);
    this.plot.addEventListener("pointerleave", (event) => {
      // A finger leaves as soon as it is lifted: what it asked for stays until it touches another place.
      if (start === null && event.pointerType !== "touch") this.read(null);
      this.page.busy(false);
    });
    this.plot.addEventListener("dblclick", () => this.page.look(null, null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.read(null));
  }

  key(event) {
    const xs = this.spec.series[0].x;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.page.look(null, null);
    if (!(event.key in moves) || !xs.length) return;
    event.preventDefault();
    const now = this.at === undefined || this.at === null ? xs.length - 1 : this.at + moves[event.key];
    this.read(xs[Math.min(xs.length - 1, Math.max(0, now))]);
  }

  step(x) {
    const [from, to] = this.page.view();
    return from + ((x - this.box.left) / (this.box.right - this.box.left)) * (to - from);
  }

  select(one, other) {
    const [left, right] = [one, other].sort((a, b) => a - b);
    this.read(null);
    this.cursor.append(make("rect", { class: "drag", x: left, width: right - left, y: this.box.top, height: this.box.bottom - this.box.top }));
  }

  read(step) {
    this.cursor.replaceChildren();
    if (this.tip) this.tip.remove();
    this.tip = null;
    this.at = null;
    if (step === null) return;
    const [from, to] = this.page.view();
    const near = this.spec.series.map((one) => this.nearest(one, step, from, to));
    const found = near.filter((part) => part !== null);
    if (!found.length) return;
    const chosen = found.reduce((best, part) => (Math.abs(part.x - step) < Math.abs(best.x - step) ? part : best));
    this.at = chosen.number;
    const x = this.x(chosen.x);
    this.cursor.append(make("line", { class: "cursor", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }));
    const rows = [];
    near.forEach((part, number) => {
      if (part === null || rows.length > 8) return;
      const one = this.spec.series[number];
      this.cursor.append(make("circle", { cx: this.x(part.x), cy: this.y(part.y), r: 3.5, style: { fill: this.colour(number) } }));
      const band = one.lo && one.lo[part.number] !== one.hi[part.number] ? ` (${shown(one.lo[part.number], this.spec.unit)} to ${shown(one.hi[part.number], this.spec.unit)})` : "";
      const key = this.spec.series.length > 1 ? make("span", {}, make("span", { class: "key", style: { background: this.colour(number) } }), `${one.name} `) : null;
      rows.push(make("div", {}, key, make("b", {}, shown(part.y, this.spec.unit)), band));
    });
    this.tip = make("div", { class: "tip" }, make("div", {}, `step ${Math.round(chosen.x).toLocaleString("en-US")}`), ...rows);
    this.plot.append(this.tip);
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, x + 12 > room ? x - this.tip.offsetWidth - 12 : x + 12))}px`;
  }

  nearest(one, step, from, to) {
    const after = place(one.x, step);
    const numbers = [after - 1, after].filter((number) => number >= 0 && number < one.x.length && one.x[number] >= from && one.x[number] <= to);
    if (!numbers.length) return null;
    const number = numbers.reduce((best, part) => (Math.abs(one.x[part] - step) < Math.abs(one.x[best] - step) ? part : best));
    return { number, x: one.x[number], y: one.y[number] };
  }
}
