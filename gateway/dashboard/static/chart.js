// One chart: a title, what each line is with its value under the cursor (or the latest), and uPlot's picture.

import { fill, h } from "/dashboard/dom.js";

const HEIGHT = 150;
const WINDOW_S = 600;

export class Chart {
  constructor({ title, note, lines, format, top, whole }) {
    this.whole = whole;
    this.lines = lines;
    this.format = format;
    this.top = top;
    this.data = [[], ...lines.map(() => [])];
    this.legend = h("div", { class: "legend" });
    this.canvas = h("div", { class: "plot", role: "img", "aria-label": title });
    this.title = title;
    this.nothing = h("p", { class: "plot-empty", hidden: true }, "Nothing yet");
    this.element = h(
      "article",
      { class: "card chart" },
      h("header", {}, h("h3", {}, title), h("p", { class: "muted" }, note)),
      this.legend,
      h("div", { class: "plot-box" }, this.canvas, this.nothing),
    );
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  show(times, columns) {
    this.data = [times, ...columns];
    const some = columns.some((column) => column.some((value) => value !== null));
    this.nothing.hidden = some;
    if (!this.plot) this.draw();
    else this.plot.setData(this.data);
    this.values(null);
  }

  // Colours come from the style sheet: drawn anew when the theme changes.
  draw() {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--muted"),
      font: '11px ui-sans-serif, system-ui, sans-serif',
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    this.plot = new window.uPlot(
      {
        width: Math.max(120, this.canvas.clientWidth),
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: {
          x: { time: true, range: (_, low, high) => [Math.max(low ?? 0, (high ?? 0) - WINDOW_S), Math.max(high ?? 1, (low ?? 0) + 60)] },
          y: { range: (_, low, high) => [0, this.top ?? Math.max(1e-9, (high ?? 1) * 1.15)] },
        },
        axes: [
          { ...axis, grid: { show: false }, size: 24, space: 70, values: (_, ticks) => ticks.map((each) => new Date(each * 1000).toTimeString().slice(0, 5)), incrs: [60, 120, 300] },
          { ...axis, size: 58, space: 34, ...(this.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] } : {}), values: (_, ticks) => ticks.map((each) => this.format(each)) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            label: line.label,
            stroke: colour(line.colour),
            fill: line.fill ? `color-mix(in srgb, ${colour(line.colour)} 12%, transparent)` : undefined,
            width: 1.6,
            dash: line.dash,
            points: { size: 4 },
          })),
        ],
        hooks: { setCursor: [(plot) => this.values(plot.cursor.idx)] },
      },
      this.data,
      this.canvas,
    );
  }

  resize() {
    if (this.plot && this.canvas.clientWidth) this.plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT });
  }

  values(place) {
    const values = this.lines.map((_, line) => (place === null || place === undefined ? this.data[line + 1].at(-1) : this.data[line + 1][place]) ?? null);
    fill(
      this.legend,
      this.lines.map((line, number) =>
        h("span", { class: "key" }, h("i", { class: `swatch ${line.dash ? "dashed" : ""}`, "data-colour": line.colour.slice(2) }), line.label, h("b", {}, this.format(values[number]))),
      ),
    );
    if (place === null) this.canvas.setAttribute("aria-label", `${this.title}: ${this.lines.map((line, number) => `${line.label} ${this.format(values[number])}`).join(", ")}`);
  }
}
