"use strict";
// Draws everything, and again what a choice of the reader changes.

const MOST_DRAWN = 12; // methods in the charts at first

function drawSubtitle() {
  const { task } = state;
  const runs = task.methods.flatMap((method) => method.runs);
  const facts = [
    task.name,
    task.shared.workers && plural(Number(task.shared.workers), "worker"),
    task.shared.steps &&
      `${plural(Number(task.shared.steps), "step")}${task.shared.batch_size ? ` of batch ${task.shared.batch_size}` : ""}`,
    `${plural(task.methods.length, "method")}, ${plural(runs.length, "run")}`,
  ];
  $("subtitle").textContent = facts.filter(Boolean).join(" · ");
}

function drawCharts() {
  curves.draw();
  pareto.draw();
  layers.draw();
}

/** After a choice that changes figures. */
function changed() {
  forget();
  drawSummary();
  drawTable();
  drawLegend();
  drawCharts();
}

/** Shows or hides a method in the charts. */
function switchMethod(method) {
  if (!state.hidden.delete(method)) state.hidden.add(method);
  forget();
  const focused = document.activeElement;
  const isInLegend = focused?.closest("#legend") !== null;
  if (!isInLegend) drawLegend();
  else drawTable();
  drawCharts();
}

function drawAll() {
  forget();
  drawSubtitle();
  drawControls();
  drawFilters();
  drawLegendActions();
  for (const chart of [curves, pareto, layers, timeline]) chart.controls();
  changed();
  timeline.draw();
  drawSettings();
  drawRuns();
  drawFooter();
}

/** Begins with a task: its usual bandwidth, target and methods. */
function openTask(task) {
  Object.assign(state, {
    task,
    lower: task.lower_is_better,
    words: "",
    only: "all",
    hidden: new Set(),
    sort: { key: "", down: false },
  });
  const rates = recordedRates();
  const own = task.methods.find((method) => method.runs.length)?.runs[0].courses[0].networks[0]
    ?.rate;
  state.rate = rates.includes(own) ? own : (rates.at(0) ?? null);
  state.target = usualTarget();
  const isRecorded = { virtual: hasVirtual, measured: hasMeasured }[curveState.x] ?? (() => true);
  if (!isRecorded()) Object.assign(curveState, { x: "step", isLog: false });
  hideSome();
  drawAll();
}

/** Of many methods, draws the front and the baseline first, then others in order. */
function hideSome() {
  forget();
  const { all } = figures();
  if (all.length <= MOST_DRAWN) return;
  const front = frontOf(all, timeKind());
  const rank = (each) => (front.includes(each) || each.method.is_fp32 ? 0 : 1);
  const wanted = [...all].sort((a, b) => rank(a) - rank(b)).slice(0, MOST_DRAWN);
  for (const each of all) if (!wanted.includes(each)) state.hidden.add(each.method);
}

startTheme();
openTask(page.tasks[0]);
