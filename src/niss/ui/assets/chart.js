// A small line chart in SVG: drawn to the width it has, read by pointer or arrow keys, in the colours of the page.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 2.5", "8 3 2 3", "4 2"];

function add(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Dashes as given, or those of that number, or of its place.
const dashOf = (one, number) => (typeof one.dash === "string" ? one.dash : DASHES[(one.dash ?? number) % DASHES.length]);

function logTicks(low, high, most) {
  const ticks = [];
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.ceil(Math.log10(high) - 1e-9);
  const parts = last - first <= 2 ? [1, 2, 5] : [1];
  const step = Math.max(1, Math.ceil(((last - first) * parts.length) / most));
  for (let power = first; power <= last; power += step) {
    for (const part of parts) {
      const tick = part * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

function evenTicks(low, high, most) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((part) => part * power).find((one) => one >= raw * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) ticks.push(tick);
  return ticks;
}

export class Chart {
  // spec: {label, x: {label, low, high, log, format}, y: the same, series: [{name, points, colour, dash}],
  //        levels: [{name, value}], mark: {x, y, name}, head: (x) => text}
  constructor(host) {
    this.host = host;
    this.spec = null;
    this.place = null;
    this.frame = document.createElement("div");
    this.frame.className = "frame";
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "group");
    this.reading = document.createElement("p");
    this.reading.className = "reading";
    this.reading.setAttribute("aria-live", "polite");
    host.replaceChildren(this.frame, this.reading);
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.read(null));
    this.frame.addEventListener("blur", () => this.read(null));
    this.frame.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(host);
  }

  show(spec) {
    this.spec = spec;
    this.draw();
  }

  draw() {
    const spec = this.spec;
    const wide = Math.floor(this.host.clientWidth);
    if (spec === null || wide < 50) return;
    const tall = Math.round(Math.min(380, Math.max(240, wide * 0.5)));
    const area = { left: 54, right: wide - 12, top: 14, bottom: tall - 44 };
    const spot = (axis, from, to) => (value) => {
      const share = axis.log
        ? Math.log(value / axis.low) / Math.log(axis.high / axis.low)
        : (value - axis.low) / (axis.high - axis.low || 1);
      return from + (to - from) * share;
    };
    this.x = spot(spec.x, area.left, area.right);
    this.y = spot(spec.y, area.bottom, area.top);
    this.area = area;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
    svg.setAttribute("width", wide);
    svg.setAttribute("height", tall);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", spec.label);
    this.axes(svg, spec, area, tall);
    for (const level of spec.levels || []) this.level(svg, level, area);
    spec.series.forEach((one, number) => this.line(svg, one, number));
    if (spec.mark) {
      add(svg, "circle", { class: "mark", cx: this.x(spec.mark.x), cy: this.y(spec.mark.y), r: 6 });
    }
    this.cursor = add(svg, "g", { class: "cursor" });
    this.frame.setAttribute("aria-label", `${spec.label} Read it with the arrow keys.`);
    this.frame.replaceChildren(svg);
    this.legend(spec);
    this.read(this.place);
  }

  axes(svg, spec, area, tall) {
    const ticks = (axis, most) => (axis.log ? logTicks : evenTicks)(axis.low, axis.high, most);
    for (const tick of ticks(spec.y, 6)) {
      add(svg, "line", { class: "grid", x1: area.left, x2: area.right, y1: this.y(tick), y2: this.y(tick) });
      add(svg, "text", { x: area.left - 8, y: this.y(tick) + 4, "text-anchor": "end" }, spec.y.format(tick));
    }
    for (const tick of ticks(spec.x, area.right - area.left < 420 ? 4 : 8)) {
      add(svg, "line", { class: "tick", x1: this.x(tick), x2: this.x(tick), y1: area.bottom, y2: area.bottom + 5 });
      add(svg, "text", { x: this.x(tick), y: area.bottom + 19, "text-anchor": "middle" }, spec.x.format(tick));
    }
    add(svg, "line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom });
    add(svg, "text", { x: (area.left + area.right) / 2, y: tall - 6, "text-anchor": "middle" }, spec.x.label);
  }

  level(svg, level, area) {
    const y = this.y(level.value);
    add(svg, "line", { class: "level", x1: area.left, x2: area.right, y1: y, y2: y });
    add(svg, "text", { class: "level-name", x: area.right - 4, y: y + (level.below ? 14 : -5), "text-anchor": "end" }, level.name);
  }

  line(svg, one, number) {
    if (!one.points.length) return;
    const path = one.points.map(([x, y], place) => `${place ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`);
    add(svg, "path", { class: `line ${one.colour}`, d: path.join(""), "stroke-dasharray": dashOf(one, number) });
    if (one.points.length === 1) {
      add(svg, "circle", { class: `dot ${one.colour}`, cx: this.x(one.points[0][0]), cy: this.y(one.points[0][1]), r: 3.5 });
    }
  }

  legend(spec) {
    const list = document.createElement("ul");
    list.className = "legend";
    spec.series.forEach((one, number) => {
      const item = document.createElement("li");
      const key = document.createElementNS(SVG, "svg");
      key.setAttribute("viewBox", "0 0 28 10");
      key.setAttribute("width", 28);
      key.setAttribute("height", 10);
      key.setAttribute("aria-hidden", "true");
      add(key, "path", { class: `line ${one.colour}`, d: "M0 5H28", "stroke-dasharray": dashOf(one, number) });
      item.append(key, one.name);
      list.append(item);
    });
    if (spec.mark) {
      const item = document.createElement("li");
      const key = document.createElementNS(SVG, "svg");
      key.setAttribute("viewBox", "0 0 14 14");
      key.setAttribute("width", 14);
      key.setAttribute("height", 14);
      key.setAttribute("aria-hidden", "true");
      add(key, "circle", { class: "mark", cx: 7, cy: 7, r: 5 });
      item.append(key, spec.mark.name);
      list.append(item);
    }
    this.host.querySelector("ul.legend")?.remove();
    this.host.append(list);
  }

  columns() {
    return [...new Set(this.spec.series.flatMap((one) => one.points.map(([x]) => x)))].sort((one, other) => one - other);
  }

  point(event) {
    if (this.spec === null) return;
    const at = event.clientX - this.frame.getBoundingClientRect().left;
    const columns = this.columns();
    if (!columns.length) return;
    this.read(columns.reduce((best, x) => (Math.abs(this.x(x) - at) < Math.abs(this.x(best) - at) ? x : best)));
  }

  step(event) {
    const columns = this.spec === null ? [] : this.columns();
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !columns.length) return;
    event.preventDefault();
    const now = this.place === null ? (move > 0 ? -1 : columns.length) : columns.indexOf(this.place);
    this.read(columns[Math.min(columns.length - 1, Math.max(0, now + move))]);
  }

  read(x) {
    this.place = x;
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    const found = x === null ? [] : this.spec.series
      .map((one) => [one, one.points.find((point) => point[0] === x)])
      .filter(([, point]) => point !== undefined);
    if (!found.length) {
      this.place = null;
      this.reading.textContent = this.spec.idle || "Point at the chart to read its values.";
      return;
    }
    add(this.cursor, "line", { x1: this.x(x), x2: this.x(x), y1: this.area.top, y2: this.area.bottom });
    for (const [one, point] of found) add(this.cursor, "circle", { class: `dot ${one.colour}`, cx: this.x(x), cy: this.y(point[1]), r: 4 });
    this.reading.textContent = `${this.spec.head(x)}: ${found.map(([one, point]) => `${one.name} ${this.spec.y.format(point[1])}`).join(", ")}`;
  }
}
