// Line charts over time, as SVG. They are legible at any size, and accessible by keyboard and as a table.

import { element, svg } from "./dom.js";

const LEFT = 46;
const BOTTOM = 18;
const TOP = 6;
const TABLE_ROWS = 12;

export class LineChart {
  /** `series`: [{ label, kind: a|b, value: (sample) => number | undefined }]; `format`: (number) => text. */
  constructor(parent, { title, series, format }) {
    this.title = title;
    this.series = series;
    this.format = format;
    this.samples = [];
    this.bands = [];
    this.cursor = null;
    this.readings = series.map(() => element("b"));
    this.plot = svg("svg", { tabindex: "0", role: "img" });
    this.table = element("table", { hidden: true });
    const keys = series.map((item, index) =>
      element("li", {}, element("span", { class: `swatch ${item.kind}` }), item.label, this.readings[index]));
    this.when = element("li", { class: "muted" });
    const caption = element("figcaption", {}, element("strong", {}, title), element("ul", { class: "legend" }, this.when, ...keys));
    parent.append(element("figure", { class: "chart" }, caption, this.plot, this.table));
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.moveTo(null));
    this.plot.addEventListener("blur", () => this.moveTo(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
  }

  /** Shows `samples`, oldest first, over the `seconds` up to the newest, and shades `bands` of time, each [from, to] in ms. */
  show(samples, seconds, bands) {
    this.samples = samples;
    this.bands = bands;
    this.seconds = seconds;
    this.draw();
  }

  showTable(isShown) {
    this.table.hidden = !isShown;
    this.draw();
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (!width || !this.samples.length) return;
    const end = Number(this.samples.at(-1).timeUnixMs);
    const values = this.samples.flatMap((sample) => this.series.map((item) => item.value(sample) ?? 0));
    const top = niceCeiling(Math.max(...values));
    const at = (time) => Math.max(LEFT, width - (end - time) / (1000 * this.seconds) * (width - LEFT));
    const x = (sample) => at(Number(sample.timeUnixMs));
    const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);
    this.x = x;
    const shapes = this.bands.map(([from, to]) => svg("rect", {
      class: "band", x: at(from), y: TOP, width: Math.max(1, at(to) - at(from)), height: height - TOP - BOTTOM,
    }));
    for (const share of [0, 0.5, 1]) {
      const level = y(share * top);
      shapes.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: level, y2: level }));
      shapes.push(svg("text", { x: LEFT - 8, y: level + 4, "text-anchor": "end" }, this.format(share * top)));
    }
    for (const share of [0, 0.5, 1]) {
      const text = share === 1 ? "now" : `−${Math.round((1 - share) * this.seconds)} s`;
      const anchor = ["start", "middle", "end"][2 * share];
      shapes.push(svg("text", { x: LEFT + share * (width - LEFT), y: height - 3, "text-anchor": anchor }, text));
    }
    this.series.forEach((item, index) => {
      for (const run of runs(this.samples, item.value)) {
        const points = run.map((sample) => `${x(sample).toFixed(1)},${y(item.value(sample)).toFixed(1)}`);
        if (index === 0) {
          const feet = `L${x(run.at(-1)).toFixed(1)},${y(0)}L${x(run[0]).toFixed(1)},${y(0)}Z`;
          shapes.push(svg("path", { class: "area", d: `M${points.join("L")}${feet}` }));
        }
        if (points.length === 1) points.push(points[0]);
        shapes.push(svg("path", { class: `line ${item.kind}`, d: `M${points.join("L")}` }));
      }
    });
    const shown = this.shown();
    if (this.cursor !== null) {
      shapes.push(svg("line", { class: "cross", x1: x(shown), x2: x(shown), y1: TOP, y2: height - BOTTOM }));
    }
    this.plot.replaceChildren(...shapes);
    this.read(shown, end);
    if (!this.table.hidden) this.fillTable(end);
  }

  /** Returns the sample under the cursor; without a cursor, the newest. */
  shown() {
    const last = this.samples.length - 1;
    return this.samples[this.cursor === null ? last : Math.min(this.cursor, last)];
  }

  read(sample, end) {
    const ago = Math.round((end - Number(sample.timeUnixMs)) / 1000);
    this.when.textContent = this.cursor === null ? "" : `${ago} s ago`;
    const texts = this.series.map((item) => this.text(item, sample));
    this.readings.forEach((reading, index) => { reading.textContent = texts[index]; });
    const spoken = this.series.map((item, index) => `${item.label} ${texts[index]}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}, ${this.cursor === null ? "now" : `${ago} seconds ago`}: ${spoken}`);
  }

  text(item, sample) {
    const value = item.value(sample);
    return value === undefined ? "–" : this.format(value);
  }

  fillTable(end) {
    const head = element("tr", {}, ...["Seconds ago", ...this.series.map((item) => item.label)].map(
      (text) => element("th", { scope: "col" }, text)));
    const rows = this.samples.slice(-TABLE_ROWS).reverse().map((sample) => element("tr", {},
      element("td", {}, String(Math.round((end - Number(sample.timeUnixMs)) / 1000))),
      ...this.series.map((item) => element("td", {}, this.text(item, sample)))));
    this.table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  point(event) {
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    const distances = this.samples.map((sample) => Math.abs(this.x(sample) - at));
    this.moveTo(distances.indexOf(Math.min(...distances)));
  }

  step(event) {
    const last = this.samples.length - 1;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.moveTo(Math.max(0, Math.min(last, (this.cursor ?? last) + by)));
  }

  moveTo(cursor) {
    this.cursor = cursor;
    this.draw();
  }
}

/** Returns the runs of consecutive samples that have a value. */
function runs(samples, value) {
  const found = [[]];
  for (const sample of samples) {
    if (value(sample) !== undefined) found.at(-1).push(sample);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter((run) => run.length);
}

/** Returns the smallest number not below `value` that is 1, 2, 2.5, 5 or 10 times a power of ten. */
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.999);
}
