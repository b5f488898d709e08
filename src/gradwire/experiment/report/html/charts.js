"use strict";
// What all charts share: styles of methods, colours of the theme, axes, and a frame with controls.

const DASHES = [[], [7, 4], [9, 3, 2, 3], [2, 3]]; // as in report/drawing.py; markers can be hollow
const MARKERS = [
  ["circle", 0],
  ["rect", 0],
  ["rectRot", 0],
  ["triangle", 0],
  ["triangle", 180],
  ["triangle", 90],
  ["triangle", 270],
  ["star", 0],
];
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The style of a method: it keeps it whatever is filtered or hidden. */
function styleOf(method) {
  const number = state.task.methods.indexOf(method);
  const again = Math.floor(number / page.colours.length);
  const colour = page.colours[number % page.colours.length];
  const [marker, rotation] = MARKERS[(number + again) % MARKERS.length];
  return {
    colour: colour === "#000000" ? colourOf("--ink") : colour, // black is the colour of text
    dash: DASHES[(number + again) % DASHES.length],
    marker,
    rotation,
  };
}
function faded(colour, share) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${share})`;
}

const SHAPES = {
  circle: "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z",
  rect: "M-3.5 -3.5H3.5V3.5H-3.5Z",
  rectRot: "M0 -4.6L4.6 0L0 4.6L-4.6 0Z",
  triangle: "M0 -4.4L4.2 3.2H-4.2Z",
  star: "M-4.4 0H4.4M0 -4.4V4.4M-3.1 -3.1L3.1 3.1M-3.1 3.1L3.1 -3.1",
};
/** The line and the marker of a method, as in the charts. */
function swatch(method) {
  const { colour, dash, marker, rotation } = styleOf(method);
  const part = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const svg = part("svg", {
    width: 30,
    height: 14,
    viewBox: "-15 -7 30 14",
    class: "swatch",
    "aria-hidden": "true",
  });
  svg.append(
    part("path", {
      d: "M-15 0H15",
      stroke: colour,
      "stroke-width": 2,
      "stroke-dasharray": dash.join(" ") || "none",
    }),
    part("path", {
      d: SHAPES[marker],
      transform: `rotate(${rotation})`,
      fill: colour,
      stroke: colour,
      "stroke-width": 1.6,
    }),
  );
  return svg;
}

Object.assign(Chart.defaults, { responsive: true, maintainAspectRatio: false, animation: false });
Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
Chart.defaults.plugins.legend.display = false;
Object.assign(Chart.defaults.plugins.tooltip, {
  padding: 9,
  cornerRadius: 7,
  boxPadding: 4,
  usePointStyle: true,
  borderWidth: 1,
  titleFont: { weight: "600" },
});

/** Takes the colours of the theme over into all charts that are drawn from now on. */
function useTheme() {
  Chart.defaults.color = colourOf("--quiet");
  Chart.defaults.borderColor = colourOf("--grid");
  Object.assign(Chart.defaults.plugins.tooltip, {
    backgroundColor: colourOf("--panel"),
    titleColor: colourOf("--ink"),
    bodyColor: colourOf("--ink"),
    borderColor: colourOf("--line"),
  });
}

/** Round numbers of a logarithmic axis, powers of ten first, whose labels have room. */
function logTicks(low, high, room) {
  const heads = [1, 2, 5, 3, 1.5, 4, 7, 6, 8, 9, 1.2, 2.5];
  const found = [];
  for (const head of heads)
    for (
      let power = Math.floor(Math.log10(low));
      power <= Math.ceil(Math.log10(high));
      power += 1
    ) {
      const value = Number((head * 10 ** power).toPrecision(6));
      if (value < low || value > high) continue;
      if (found.every((other) => Math.abs(Math.log(value / other)) >= room * Math.log(high / low)))
        found.push(value);
    }
  return found.sort((a, b) => a - b);
}

/** An axis with a title in words and units on its labels. */
function axis(title, format, { log = false, ...more } = {}) {
  const ticks = {
    maxRotation: 0,
    autoSkipPadding: 14,
    includeBounds: false,
    callback: (value) => format(value),
    ...more.ticks,
  };
  const scale = {
    ...more,
    type: log ? "logarithmic" : "linear",
    ticks,
    title: { display: true, text: title, font: { size: 12.5 } },
    grid: { drawTicks: false },
    border: { display: false },
  };
  if (log) {
    scale.afterBuildTicks = (self) => {
      const found = logTicks(self.min, self.max, 72 / (self.width || 480));
      self.ticks = found.map((value) => ({ value }));
    };
    scale.ticks.autoSkip = false;
  }
  return scale;
}

/** Values and a little room around them. */
function padded(values, isLog = false, room = 0.06) {
  if (!values.length) return {};
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (isLog) {
    const factor = (high / low) ** room * 1.03;
    return { min: low / factor, max: high * factor };
  }
  const gap = (high - low) * room || Math.abs(high) * room || 1;
  return { min: low - gap, max: high + gap };
}
const scoreAxis = (more) =>
  axis(
    `test ${scoreName()}`,
    (value) => (isAccuracy() ? `${digits(100 * value)}%` : digits(value)),
    more,
  );

/**
 * A chart in a figure with a title, controls, and the same data as a table.
 *
 * `draw` returns the configuration of the chart, a text that describes it, and its table; or a text
 * `empty` if there is nothing to draw.
 */
function frame(id, title, controls, draw, note = "") {
  const canvas = make("canvas", { role: "img" });
  const holder = make("div", { class: "canvas" }, canvas);
  const empty = make("p", { class: "empty", hidden: true });
  const above = make("div", { class: "row" });
  const extra = make("div");
  let table = () => make("p");
  const details = tableDetails("The same as a table", () => table());
  $(id).replaceChildren(
    ...(title ? [make("h3", {}, title)] : []),
    above,
    ...(note ? [make("p", { class: "hint" }, note)] : []),
    empty,
    holder,
    extra,
    details.details,
  );
  let chart = null;
  return {
    controls: () => above.replaceChildren(...controls()),
    chart: () => chart,
    draw() {
      const found = draw();
      chart?.destroy();
      chart = null;
      const isEmpty = "empty" in found;
      empty.hidden = !isEmpty;
      holder.hidden = details.details.hidden = isEmpty;
      extra.replaceChildren(...(found.extra ?? []));
      if (isEmpty) {
        empty.replaceChildren(...[found.empty].flat());
        return;
      }
      if (found.height) holder.style.height = found.height;
      canvas.setAttribute("aria-label", found.text);
      ({ table } = found);
      details.fill();
      chart = new Chart(canvas, found.config);
    },
  };
}
