"use strict";
// What every node does in one step: computing, coding, sending, receiving.

const timelineState = { method: null, step: 0 };
const KIND_NAMES = {
  compute: "gradient (both passes)",
  other: "other calls",
  wait: "wait (neither computing nor coding)",
};
const recordings = () => state.task.methods.filter((method) => method.timeline?.steps);

function timelineControls() {
  const found = recordings();
  if (!found.length) return [];
  if (!found.includes(timelineState.method))
    [timelineState.method, timelineState.step] = [found[0], 0];
  const steps = timelineState.method.timeline.steps;
  const choose = (value) => {
    [timelineState.method, timelineState.step] = [found[Number(value)], 0];
    timeline.controls();
    timeline.draw();
  };
  const list = select(
    "Method",
    found.map((method, number) => [String(number), method.name]),
    String(found.indexOf(timelineState.method)),
    choose,
  );
  list.id = "timeline-method";
  const value = make("output", {}, `step ${steps[timelineState.step].step}`);
  const slider = make("input", {
    type: "range",
    id: "timeline-step",
    min: 0,
    max: steps.length - 1,
    step: 1,
    "aria-label": "Step",
    oninput: () => {
      timelineState.step = Number(slider.value);
      value.textContent = `step ${steps[timelineState.step].step}`;
      timeline.draw();
    },
  });
  slider.value = timelineState.step;
  return [
    make("label", {}, "Method", list),
    ...(steps.length > 1 ? [make("label", { class: "grow" }, slider, value)] : []),
  ];
}

const timeline = frame("timeline", "", timelineControls, () => {
  if (!recordings().length) return { empty: howToRecord() };
  const { timeline: recorded } = timelineState.method;
  const step = recorded.steps[timelineState.step];
  const rows = recorded.nodes.flatMap((node, rank) =>
    page.lanes.map((lane, number) => ({
      key: `${rank} ${number}`,
      label: number ? lane : `${node}: ${lane}`,
    })),
  );
  const labels = new Map(rows.map((row) => [row.key, row.label]));
  const kinds = Object.keys(page.span_colours)
    .filter((kind) => step.spans.some((span) => span[2] === kind))
    .reverse();
  const colour = (kind) => (kind === "wait" ? colourOf("--line") : page.span_colours[kind]);
  return {
    height: `${4 + 1.15 * rows.length}rem`,
    config: {
      type: "bar",
      data: {
        labels: rows.map((row) => row.key),
        datasets: kinds.map((kind) => ({
          label: kind,
          backgroundColor: colour(kind),
          grouped: false,
          barThickness: 13,
          minBarLength: 1,
          borderSkipped: false,
          borderColor: colourOf("--panel"),
          borderWidth: kind === "wait" ? 0 : { left: 0.5, right: 0.5 },
          order: kind === "wait" ? 1 : 0,
          data: step.spans
            .filter((span) => span[2] === kind)
            .flatMap(([rank, lane, , name, start, end]) =>
              (kind === "wait" ? [0, 1] : [lane]).map((row) => ({
                y: `${rank} ${row}`,
                x: [start, end],
                name,
              })),
            ),
        })),
      },
      options: {
        indexAxis: "y",
        interaction: { mode: "nearest", axis: "xy", intersect: true },
        scales: {
          x: axis("time since the step began", formatTime, { min: 0, max: step.window_s }),
          y: {
            grid: { display: false },
            border: { display: false },
            ticks: {
              autoSkip: false,
              font: { size: 11 },
              callback: (_, number) => rows[number].label,
            },
          },
        },
        plugins: {
          tooltip: {
            callbacks: {
              title: ([item]) => item.raw.name,
              label: ({ raw, dataset }) => [
                KIND_NAMES[dataset.label] ?? dataset.label,
                `${formatTime(raw.x[1] - raw.x[0])}, from ${formatTime(raw.x[0])} to ${formatTime(raw.x[1])}`,
              ],
            },
          },
        },
      },
    },
    text: `Step ${step.step} of ${timelineState.method.name}: ${plural(recorded.nodes.length, "node")}, ${formatTime(step.window_s)}. The table below has the shares of each worker.`,
    extra: [
      make(
        "div",
        { class: "keys" },
        [...kinds].reverse().map((kind) => {
          const mark = make("i");
          mark.style.background = colour(kind);
          return make("span", {}, mark, KIND_NAMES[kind] ?? kind);
        }),
      ),
      make(
        "p",
        { class: "hint" },
        pathText(step),
        recorded.num_nodes > recorded.nodes.length
          ? ` The first ${recorded.nodes.length} of ${recorded.num_nodes} nodes are drawn.`
          : "",
      ),
    ],
    table: () => shares(step),
  };
});

const pathText = (step) =>
  `The step takes ${formatTime(step.window_s)}. On its critical path: ${Object.entries(
    step.critical_path_s,
  )
    .filter(([, seconds]) => seconds > 0)
    .map(([kind, seconds]) => `${kind} ${formatTime(seconds)}`)
    .join(", ")}.`;

function shares(step) {
  const lanes = Object.keys(step.workers[0]).filter((name) => name.startsWith("busy_"));
  const percent = (share) => `${digits(100 * share)}%`;
  return plainTable(
    ["worker", "exposed communication", ...lanes.map((lane) => lane.slice(5))],
    step.workers.map((worker) => [
      String(worker.rank),
      `${formatTime(worker.exposed_s)}, ${percent(worker.exposed_share)}`,
      ...lanes.map((lane) => percent(worker[lane])),
    ]),
    { caption: "Share of the step that each lane is busy" },
  );
}

function howToRecord() {
  const failed = state.task.methods.find((method) => method.timeline?.reason);
  const config = state.task.methods.find((method) => method.config)?.config ?? "config.toml";
  return [
    failed
      ? `${failed.name}: ${failed.timeline.reason}. `
      : "No run has recorded what its workers do when. ",
    "Record some steps of a method, and give the folder to the report as well:",
    make(
      "pre",
      {},
      make(
        "code",
        {},
        `gradwire run --config ${config} --steps 10 --what-if --record-spans --out runs/spans`,
      ),
    ),
  ];
}
