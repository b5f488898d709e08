"use strict";
// Score or loss against steps, bytes or time.

const curveState = { x: "virtual", y: "score", isLog: true, isEach: false };

const X_KINDS = {
  step: ["steps", (value) => digits(value)],
  epoch: ["epochs", (value) => digits(value)],
  bytes: ["bytes sent per worker", formatBytes],
  virtual: ["virtual time", formatTime],
  measured: ["measured time", formatTime],
};
const yTitle = (kind) =>
  ({ score: `test ${scoreName()}`, test_loss: "test loss", train_loss: "training loss" })[kind];
const formatY = (kind, value) => (kind === "score" ? formatScore(value) : digits(value, 4));
const xTitle = (kind) =>
  X_KINDS[kind][0] +
  (kind === "virtual" && state.rate !== null ? ` at ${formatRate(state.rate)}` : "");

function curveControls() {
  const kinds = Object.keys(X_KINDS).filter(
    (kind) => (kind !== "virtual" || hasVirtual()) && (kind !== "measured" || hasMeasured()),
  );
  const y = select(
    "What is drawn",
    ["score", "test_loss", "train_loss"].map((kind) => [kind, yTitle(kind)]),
    curveState.y,
    (value) => {
      curveState.y = value;
      curves.draw();
    },
  );
  const x = select(
    "Against what",
    kinds.map((kind) => [kind, X_KINDS[kind][0]]),
    curveState.x,
    (value) => {
      curveState.x = value;
      curveState.isLog = value === "bytes" || value === "virtual" || value === "measured";
      curves.controls();
      curves.draw();
      $("curve-x").focus();
    },
  );
  [x.id, y.id] = ["curve-x", "curve-y"];
  const controls = [
    make("label", {}, y),
    make("label", {}, "against", x),
    checkbox("log", curveState.isLog, (value) => {
      curveState.isLog = value;
      curves.draw();
    }),
  ];
  if (state.task.methods.some((method) => method.runs.length > 1))
    controls.push(
      checkbox("every run", curveState.isEach, (value) => {
        curveState.isEach = value;
        curves.draw();
      }),
    );
  return controls;
}

const curves = frame("curves", "Curves", curveControls, () => {
  const { x, y, isLog, isEach } = curveState;
  const { drawn } = figures();
  const found = drawn.map(({ method }) => ({
    method,
    lines: curvesOf(method, x, y, isEach).filter((points) => points.length),
  }));
  const usable = found.filter(({ lines }) => lines.length);
  if (!usable.length) return { empty: emptyCurves(found) };
  const datasets = usable.flatMap(({ method, lines }) =>
    lines.flatMap((points) => curveDatasets(method, points, isEach)),
  );
  const xs = usable.flatMap(({ lines }) => lines.flat()).map((point) => point.x);
  if (y === "score") datasets.push(targetLine(xs));
  const missing = found.length - usable.length;
  const format = X_KINDS[x][1];
  return {
    config: {
      type: "line",
      data: { datasets },
      options: {
        parsing: false,
        interaction: { mode: "nearest", axis: "xy", intersect: false },
        scales: {
          x: axis(xTitle(x), format, {
            log: isLog,
            ...(isLog
              ? padded(
                  xs.filter((value) => value > 0),
                  true,
                  0.02,
                )
              : { beginAtZero: true, max: Math.max(...xs) }),
          }),
          y: y === "score" ? scoreAxis({}) : axis(yTitle(y), (value) => digits(value), {}),
        },
        plugins: {
          tooltip: {
            filter: (item) => item.dataset.method !== undefined,
            callbacks: {
              title: ([item]) => item?.dataset.method.name ?? "",
              label: ({ raw }) => curveLabel(raw, x, y),
              labelPointStyle: pointStyle,
              labelColor: labelColour,
            },
          },
        },
      },
    },
    text: `Curves of ${plural(usable.length, "method")}: ${yTitle(y)} against ${xTitle(x)}. The table below has the same values.`,
    extra: missing
      ? [
          make(
            "p",
            { class: "hint" },
            `${plural(missing, "method has", "methods have")} no ${xTitle(x)}.`,
          ),
        ]
      : [],
    table: () =>
      plainTable(
        ["method", "step", xTitle(x), yTitle(y), ...(isEach ? [] : ["± over seeds"])],
        usable.flatMap(({ method, lines }) =>
          lines
            .flat()
            .map((point) => [
              method.name,
              digits(point.step, 6),
              format(point.x),
              formatY(y, point.y),
              ...(isEach ? [] : [point.spread === null ? "–" : formatY(y, point.spread)]),
            ]),
        ),
        { caption: "Curves" },
      ),
  };
});

function emptyCurves(found) {
  if (!found.length) return "No method is chosen: press one of the buttons above.";
  return curveState.x === "virtual"
    ? "These methods have no times at this bandwidth."
    : "These methods have not recorded that.";
}

function curveLabel(point, x, y) {
  const spread = point.spread === null ? "" : ` ± ${formatY(y, point.spread)}`;
  const lines = [
    `${yTitle(y)} ${formatY(y, point.y)}${spread}`,
    `step ${digits(point.step, 6)}, ${formatBytes(point.bytes)} per worker`,
  ];
  if (x === "virtual" || x === "measured")
    lines.push(`${point.isBetween ? "≈ " : ""}${formatTime(point.x)}, ${xTitle(x)}`);
  return lines;
}
const pointStyle = ({ dataset }) => {
  const style = styleOf(dataset.method);
  return { pointStyle: style.marker, rotation: style.rotation };
};
const labelColour = ({ dataset }) => {
  const { colour } = styleOf(dataset.method);
  return { borderColor: colour, backgroundColor: colour };
};

/** A line with markers, and a band of one standard deviation around it. */
function curveDatasets(method, points, isEach) {
  const { colour, dash, marker, rotation } = styleOf(method);
  const line = {
    method,
    data: points,
    borderColor: isEach ? faded(colour, 0.75) : colour,
    backgroundColor: colour,
    borderDash: dash,
    borderWidth: isEach ? 1.2 : 2,
    pointStyle: marker,
    pointRotation: rotation,
    pointRadius: points.length > 40 || isEach ? 0 : 3,
    pointHoverRadius: 6,
    pointHitRadius: 12,
    clip: 8, // markers on the edge are drawn whole
  };
  const spread = points.filter((point) => point.spread !== null);
  if (isEach || spread.length < 2) return [line];
  const edge = (sign) => ({
    data: spread.map((point) => ({ x: point.x, y: point.y + sign * point.spread })),
    borderWidth: 0,
    pointRadius: 0,
    pointHitRadius: 0,
    pointHoverRadius: 0,
    backgroundColor: faded(colour, 0.14),
  });
  return [line, edge(1), { ...edge(-1), fill: "-1" }];
}

/** The target, as a line across the chart. */
const targetLine = (xs) => ({
  data: [
    { x: Math.min(0, ...xs) || Math.min(...xs) / 100, y: state.target },
    { x: Math.max(...xs) * 100, y: state.target },
  ],
  borderColor: colourOf("--quiet"),
  borderWidth: 1,
  borderDash: [3, 4],
  pointRadius: 0,
  pointHitRadius: 0,
  pointHoverRadius: 0,
});

/** Buttons that show several methods at once: of those that the filter leaves. */
function drawLegendActions() {
  const action = (text, isShown) =>
    make("button", { type: "button", onclick: () => showOnly(isShown) }, text);
  const showOnly = (isShown) => {
    const { left } = figures();
    const front = frontOf(left, paretoState.kind || timeKind());
    for (const each of left)
      if (isShown(each, front)) state.hidden.delete(each.method);
      else state.hidden.add(each.method);
    changed();
  };
  $("legend-actions").replaceChildren(
    action("All", () => true),
    action("None", () => false),
    action("Pareto front only", (each, front) => front.includes(each)),
  );
}

function drawLegend() {
  const { left } = figures();
  $("legend").replaceChildren(
    ...left.map(({ method }) =>
      make(
        "button",
        {
          type: "button",
          "aria-pressed": !state.hidden.has(method),
          title: method.name,
          onclick: (event) => {
            switchMethod(method);
            event.currentTarget.setAttribute("aria-pressed", !state.hidden.has(method));
          },
        },
        swatch(method),
        make("span", {}, method.name),
      ),
    ),
  );
}
