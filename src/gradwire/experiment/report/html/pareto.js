"use strict";
// Score at the end of a run against the time that it takes, and the methods that none other beats.

const paretoState = { kind: "", isFixed: false };

function paretoControls() {
  const controls = [];
  if (hasVirtual() && hasMeasured())
    controls.push(
      select(
        "Kind of time",
        [
          ["virtual", "virtual time"],
          ["measured", "measured time"],
        ],
        paretoState.kind || timeKind(),
        (value) => {
          paretoState.kind = value;
          pareto.draw();
        },
      ),
    );
  if (recordedRates().length > 1)
    controls.push(
      checkbox("same axis at all bandwidths", paretoState.isFixed, (value) => {
        paretoState.isFixed = value;
        pareto.draw();
      }),
    );
  return controls;
}

const pareto = frame(
  "pareto",
  "Pareto front: end of training",
  paretoControls,
  () => {
    const kind = paretoState.kind && hasMeasured() && hasVirtual() ? paretoState.kind : timeKind();
    const { drawn } = figures();
    const usable = drawn.filter((each) => each.score !== null && finalTime(each, kind) !== null);
    if (!usable.length)
      return {
        empty: drawn.length
          ? "These methods have no times at this bandwidth."
          : "No method is chosen: press one of the buttons above.",
      };
    const front = frontOf(usable, kind);
    const isFixed = paretoState.isFixed && kind === "virtual" && state.rate !== null;
    const times = isFixed ? timesAtAllRates(usable) : usable.map((each) => finalTime(each, kind));
    const spreads = usable.flatMap((each) => [
      each.score - (each.deviation ?? 0),
      each.score + (each.deviation ?? 0),
    ]);
    const title = kind === "virtual" ? xTitle("virtual") : "measured time of training";
    const datasets = [
      ...usable.map((each) => pointDataset(each, kind, front.includes(each))),
      frontDataset(front, kind),
      ...usable.flatMap((each) => spreadDataset(each, kind)),
    ];
    const missing = drawn.length - usable.length;
    return {
      config: {
        type: "scatter",
        data: { datasets },
        plugins: [pointNames],
        options: {
          layout: { padding: { top: 14, right: 6 } },
          interaction: { mode: "nearest", axis: "xy", intersect: false },
          scales: {
            x: axis(title, formatTime, { log: true, ...padded(times, true, 0.09) }),
            y: scoreAxis({
              ...padded(spreads, false, 0.12),
              reverse: state.lower,
              ticks: { maxTicksLimit: 8 },
            }),
          },
          plugins: {
            tooltip: {
              filter: (item) => item.dataset.method !== undefined,
              callbacks: {
                title: ([item]) => item?.dataset.method.name ?? "",
                label: ({ dataset }) => paretoLabel(dataset.figures, kind, dataset.isFront),
                labelPointStyle: pointStyle,
                labelColor: labelColour,
              },
            },
          },
        },
      },
      text: `Test ${scoreName()} against ${title}. On the Pareto front, from fast to slow: ${front.map((each) => `${each.method.name}, ${formatScore(each.score)} after ${formatTime(finalTime(each, kind))}`).join("; ")}.`,
      extra: missing
        ? [
            make(
              "p",
              { class: "hint" },
              `${plural(missing, "method has", "methods have")} no time at this bandwidth.`,
            ),
          ]
        : [],
      table: () =>
        plainTable(
          ["method", "on the front", title, `test ${scoreName()}`, "± over seeds"],
          [...usable]
            .sort((a, b) => finalTime(a, kind) - finalTime(b, kind))
            .map((each) => [
              each.method.name,
              front.includes(each) ? "yes" : "no",
              about(kind === "virtual" ? each : {}, finalTime(each, kind), formatTime),
              formatScore(each.score),
              each.deviation === null ? "–" : formatY("score", each.deviation),
            ]),
          { caption: "Pareto front" },
        ),
    };
  },
  "Filled points are on the front: no other method is as good in less time.",
);

/** The times of methods at the slowest and the fastest bandwidth that they have recorded. */
const timesAtAllRates = (usable) =>
  usable.flatMap(({ method }) =>
    method.runs.flatMap((run) =>
      run.courses.flatMap((course) =>
        course.networks
          .filter((network) => network.rate !== null)
          .map((network) => last(network.times)),
      ),
    ),
  );

function pointDataset(each, kind, isFront) {
  const { colour, marker, rotation } = styleOf(each.method);
  return {
    method: each.method,
    figures: each,
    isFront,
    data: [{ x: finalTime(each, kind), y: each.score }],
    pointStyle: marker,
    pointRotation: rotation,
    pointRadius: isFront ? 7 : 5.5,
    pointHoverRadius: 9,
    pointHitRadius: 14,
    borderColor: colour,
    borderWidth: 2,
    backgroundColor: isFront ? colour : colourOf("--panel"),
  };
}

const frontDataset = (front, kind) => ({
  type: "line",
  data: front.map((each) => ({ x: finalTime(each, kind), y: each.score })),
  stepped: true,
  order: 2,
  borderColor: colourOf("--quiet"),
  borderWidth: 1.5,
  pointRadius: 0,
  pointHitRadius: 0,
  pointHoverRadius: 0,
});

/** One standard deviation above and below. */
function spreadDataset(each, kind) {
  if (!each.deviation) return [];
  const x = finalTime(each, kind);
  return [
    {
      type: "line",
      order: 3,
      data: [
        { x, y: each.score - each.deviation },
        { x, y: each.score + each.deviation },
      ],
      borderColor: faded(styleOf(each.method).colour, 0.55),
      borderWidth: 1.5,
      pointRadius: 0,
      pointHitRadius: 0,
      pointHoverRadius: 0,
    },
  ];
}

function paretoLabel(each, kind, isFront) {
  const spread = each.deviation === null ? "" : ` ± ${formatY("score", each.deviation)}`;
  return [
    `test ${scoreName()} ${formatScore(each.score)}${spread}`,
    `${about(kind === "virtual" ? each : {}, finalTime(each, kind), formatTime)}, ${formatBytes(each.bytes)} per worker and step`,
    isFront ? "on the Pareto front" : "another method is as good in less time",
  ];
}

const MOST_LETTERS = 26; // of a name next to its point

/** Writes names next to points where there is room, those of the front first and in bold. */
const pointNames = {
  id: "pointNames",
  afterDatasetsDraw(chart) {
    const points = chart.data.datasets.flatMap((dataset, number) =>
      dataset.method ? [{ dataset, ...positionOf(chart, number) }] : [],
    );
    const taken = points.map(({ x, y }) => boxAround(x, y, 8, 8));
    points.sort((a, b) => Number(b.dataset.isFront) - Number(a.dataset.isFront));
    for (const point of points) writeName(chart, point, taken);
  },
};
function positionOf(chart, number) {
  const [{ x, y }] = chart.getDatasetMeta(number).data;
  return { x, y };
}
const boxAround = (x, y, halfWidth, halfHeight) => ({
  left: x - halfWidth,
  right: x + halfWidth,
  top: y - halfHeight,
  bottom: y + halfHeight,
});
const overlaps = (one, other) =>
  one.right > other.left &&
  one.left < other.right &&
  one.bottom > other.top &&
  one.top < other.bottom;

/** Writes the name of a point at the first place around it that is free, or not at all. */
function writeName({ ctx, chartArea }, { dataset, x, y }, taken) {
  const { isFront, method } = dataset;
  const isLong = method.name.length > MOST_LETTERS;
  const name = isLong ? `${method.name.slice(0, MOST_LETTERS - 1)}…` : method.name;
  ctx.save();
  ctx.font = `${isFront ? 600 : 400} 12px ${Chart.defaults.font.family}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillStyle = colourOf(isFront ? "--ink" : "--quiet");
  const half = ctx.measureText(name).width / 2;
  const [far, near] = [half + 12, half / 2];
  const places = [
    [far, -13],
    [-far, -13],
    [near, -20],
    [far, 13],
    [-far, 13],
    [0, 20],
  ];
  const isFree = (box) =>
    box.left >= chartArea.left &&
    box.right <= chartArea.right + 6 &&
    box.top >= chartArea.top - 14 &&
    box.bottom <= chartArea.bottom &&
    !taken.some((other) => overlaps(box, other));
  for (const [right, down] of places) {
    const box = boxAround(x + right, y + down, half, 7);
    if (!isFree(box)) continue;
    taken.push(box);
    ctx.fillText(name, x + right, y + down);
    break;
  }
  ctx.restore();
}
