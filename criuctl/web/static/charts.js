// Small bar charts in SVG, one bar a checkpoint, oldest on the left: enough to see growth, a jump, or a slow dump.
//
// A chart is one picture with one name.  Its bars take the mouse to a checkpoint; the table below it has the same links for keys.

import { h, svg } from "./dom.js";
import { plural } from "./format.js";

const WIDTH = 360,
  HEIGHT = 120,
  LEFT = 2,
  RIGHT = 54,
  TOP = 10,
  BOTTOM = 4;

/** A round number that is not below `value`; `unit` is what the next larger unit has of the smaller one. */
function ceiling(value, unit) {
  if (value <= 0) return 1;
  const whole = unit ? unit ** Math.floor(Math.log(value) / Math.log(unit)) : 1;
  const power = 10 ** Math.floor(Math.log10(value / whole));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((step) => step * power * whole).find((step) => step >= value);
}

function summary(title, known, show) {
  const values = known.map((point) => point.value);
  const range = `from ${show(Math.min(...values))} to ${show(Math.max(...values))}`;
  return `${title}: ${plural(known.length, "checkpoint")}, ${range}, the newest ${show(values.at(-1))}`;
}

/** `points` are {value, label, href}; `show` makes a value readable. */
export function bars({ title, points, show, kind, unit }) {
  const known = points.filter((point) => point.value !== null && point.value !== undefined);
  const last = known.at(-1);
  const figure = h(
    "figure",
    { class: `chart ${kind}` },
    h("figcaption", {}, h("span", {}, title), h("strong", {}, last ? show(last.value) : "–")),
  );
  if (!known.length) {
    figure.append(h("p", { class: "empty" }, "not known yet"));
    return figure;
  }
  const most = ceiling(Math.max(...known.map((point) => point.value)), unit);
  const step = (WIDTH - LEFT - RIGHT) / Math.max(points.length, 12);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "img",
    "aria-label": summary(title, known, show),
  });
  for (const part of [1, 0.5]) {
    drawing.append(svg("line", { class: "grid", x1: 0, x2: WIDTH - RIGHT + 6, y1: y(most * part), y2: y(most * part) }));
    drawing.append(svg("text", { class: "axis", x: WIDTH, y: y(most * part) + 3, "text-anchor": "end" }, show(most * part)));
  }
  drawing.append(svg("line", { class: "base", x1: 0, x2: WIDTH - RIGHT + 6, y1: y(0), y2: y(0) }));
  points.forEach((point, i) => {
    const height = point.value ? Math.max(2, y(0) - y(point.value)) : 0;
    const x = LEFT + i * step;
    const bar = svg(
      "g",
      { class: "bar", onclick: () => (location.hash = point.href) },
      svg("rect", { class: "hit", x, y: TOP, width: step, height: HEIGHT - TOP - BOTTOM }),
      svg("rect", {
        class: "value",
        x: x + step * 0.12,
        y: y(0) - height,
        width: step * 0.76,
        height,
        rx: Math.min(2, step / 4),
      }),
      svg("title", {}, `${point.label}: ${point.value === null || point.value === undefined ? "not known" : show(point.value)}`),
    );
    drawing.append(bar);
  });
  figure.append(drawing);
  return figure;
}

/** One bar of several parts: {name, value}. */
export function stack(parts, show) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const shown = parts.filter((part) => part.value > 0);
  if (!total) return h("p", { class: "empty" }, "nothing");
  return h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "stack-bar" },
      shown.map((part) => {
        const piece = h("span", { class: part.kind, title: `${part.name}: ${show(part.value)}` });
        piece.style.flexGrow = String(part.value / total);
        return piece;
      }),
    ),
    h(
      "ul",
      {},
      shown.map((part) => h("li", {}, h("i", { class: part.kind }), `${part.name} `, h("strong", {}, show(part.value)))),
    ),
  );
}
