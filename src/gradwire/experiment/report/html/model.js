"use strict";
// The data, what the reader has chosen, and everything that is computed from both.

const page = JSON.parse(document.getElementById("data").textContent);
const state = {
  task: page.tasks[0],
  rate: null, // bits per second; null: each run on its own network
  target: 0,
  lower: false, // is a lower score better?
  words: "", // filter
  only: "all",
  hidden: new Set(), // methods that are not in the charts
  sort: { key: "", down: false },
};
const isAccuracy = () => state.task.score === "accuracy";
const scoreName = () => (isAccuracy() ? "accuracy" : state.task.score);
const formatScore = (value) =>
  value === null ? "NaN" : isAccuracy() ? `${(100 * value).toFixed(1)}%` : digits(value, 4);
const formatTarget = () =>
  isAccuracy() ? `${digits(100 * state.target, 4)}%` : digits(state.target, 4);
const isBetter = (one, other) => (state.lower ? one < other : one > other);
const reaches = (score) => score !== null && !isBetter(state.target, score);

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const mean = (values) =>
  values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(
    values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1),
  );
}
const isSame = (one, other) => Math.abs(one - other) <= 1e-9 * other;

/** The bandwidths that runs of the task have recorded, ascending. */
function recordedRates() {
  const rates = new Set();
  for (const method of state.task.methods)
    for (const run of method.runs)
      for (const course of run.courses)
        for (const network of course.networks) if (network.rate !== null) rates.add(network.rate);
  return [...rates].sort((a, b) => a - b);
}

/**
 * The course of a run at the chosen bandwidth: its rows and virtual times; null without.
 *
 * Between two recorded bandwidths, times are interpolated linearly in 1 / bandwidth, and never
 * beyond the recorded ones. A run that did something else on each network has no times in between.
 */
function courseAt(run, rate = state.rate) {
  if (rate === null) {
    const course = run.courses[0];
    return course.networks.length
      ? { course, times: course.networks[0].times, isBetween: false }
      : null;
  }
  for (const course of run.courses)
    for (const network of course.networks)
      if (network.rate !== null && isSame(network.rate, rate))
        return { course, times: network.times, isBetween: false };
  if (run.courses.length > 1) return null;
  const course = run.courses[0];
  const networks = course.networks
    .filter((each) => each.rate !== null)
    .sort((a, b) => a.rate - b.rate);
  const above = networks.findIndex((each) => each.rate > rate);
  if (above < 1) return null;
  const [slow, fast] = [networks[above - 1], networks[above]];
  const share = (1 / rate - 1 / fast.rate) / (1 / slow.rate - 1 / fast.rate);
  const times = fast.times.map((time, row) => time + share * (slow.times[row] - time));
  return { course, times, isBetween: true };
}

/** What a run has reached: rows of its course with x values of a kind; null if it has none. */
function pathOf(run, kind) {
  if (kind === "virtual") {
    const found = courseAt(run);
    return found && { ...found, x: found.times };
  }
  const course = (courseAt(run) ?? { course: run.courses[0] }).course;
  const x = course[kind];
  return x ? { course, x, isBetween: false } : null;
}

const last = (values) => (values.length ? values.at(-1) : null);

/** When a run has first reached the target, at one of its evaluations; null: not. */
function timeToTarget(run, kind) {
  const path = pathOf(run, kind);
  const row = path ? path.course.score.findIndex(reaches) : -1;
  return row < 0 ? null : path.x[row];
}

/** The figures of a method: means over its runs. A time is null unless all runs have it. */
function figuresOf(method) {
  const runs = method.runs;
  const finals = runs.map((run) => pathOf(run, "virtual"));
  const scores = known(
    runs.map((run) => last((courseAt(run) ?? { course: run.courses[0] }).course.score)),
  );
  const all = (values) =>
    values.length && values.every((value) => value !== null) ? mean(values) : null;
  const kind = timeKind();
  const reached = runs.map((run) => timeToTarget(run, kind));
  return {
    method,
    score: mean(scores),
    deviation: deviation(scores),
    runs: runs.length,
    bytes: mean(runs.map((run) => run.bytes_per_worker_step)),
    fp32: method.ratio_fp32,
    fp16: method.ratio_fp16,
    time: all(finals.map((path) => path && last(path.x))),
    isBetween: finals.some((path) => path?.isBetween),
    measured: all(runs.map((run) => run.training_time_s)),
    wall: mean(runs.map((run) => run.wall_time_s)),
    target: all(reached),
    numReached: known(reached).length,
    bytesToTarget: all(runs.map((run) => timeToTarget(run, "bytes"))),
  };
}

const hasVirtual = () =>
  state.task.methods.some((m) => m.runs.some((run) => run.courses[0].networks.length));
const hasMeasured = () =>
  state.task.methods.some((m) => m.runs.some((run) => run.courses[0].measured));
const timeKind = () => (hasVirtual() ? "virtual" : "measured");
const finalTime = (figures, kind) => (kind === "virtual" ? figures.time : figures.measured);

/** Those that no other method beats in both score and time, from fast to slow. */
function frontOf(all, kind) {
  const usable = all.filter((each) => each.score !== null && finalTime(each, kind) !== null);
  usable.sort(
    (a, b) => finalTime(a, kind) - finalTime(b, kind) || (isBetter(a.score, b.score) ? -1 : 1),
  );
  const front = [];
  for (const each of usable)
    if (!front.length || isBetter(each.score, front.at(-1).score)) front.push(each);
  return front;
}

let cached = null;
/** The figures of all methods that have some, and those that the filter leaves. */
function figures() {
  if (cached) return cached;
  const all = state.task.methods.filter((method) => method.runs.length).map(figuresOf);
  const front = frontOf(all, timeKind());
  const terms = state.words.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (method) => {
    const text = [method.name, ...Object.entries(method.settings).flat()].join(" ").toLowerCase();
    return terms.every((term) => text.includes(term));
  };
  const passes = (each) =>
    matches(each.method) &&
    (state.only === "all" ||
      (state.only === "front" ? front.includes(each) : each.target !== null));
  const left = all.filter(passes);
  const failed =
    state.only === "all" ? state.task.methods.filter((m) => !m.runs.length && matches(m)) : [];
  cached = { all, left, failed, drawn: left.filter((each) => !state.hidden.has(each.method)) };
  return cached;
}
const forget = () => {
  cached = null;
};

/** A target that the best method reaches late: nine tenths of the way, with all of its seeds. */
function usualTarget() {
  const courses = state.task.methods.flatMap((m) =>
    m.runs.map((run) => known(run.courses[0].score)),
  );
  const firsts = courses.filter((scores) => scores.length).map((scores) => scores[0]);
  if (!firsts.length) return 0;
  const [most, worst] = state.lower ? [Math.min, Math.max] : [Math.max, Math.min];
  const ends = state.task.methods.map((m) =>
    known(m.runs.map((run) => last(run.courses[0].score))),
  );
  const best = most(...ends.filter((scores) => scores.length).map((scores) => worst(...scores)));
  const begin = mean(firsts);
  const target = begin + 0.9 * (best - begin);
  const step = targetStep();
  const round = state.lower ? Math.ceil : Math.floor;
  return Number((round(target / step) * step).toPrecision(6));
}
const targetStep = () =>
  isAccuracy() ? 0.01 : 10 ** Math.floor(Math.log10(scoreRange().span / 50 || 1));
function scoreRange() {
  const scores = known(
    state.task.methods.flatMap((m) => m.runs.flatMap((run) => run.courses[0].score)),
  );
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  return { low, high, span: high - low };
}

/** The mean curve of a method, or one curve for each run: points with x, y, spread and step. */
function curvesOf(method, xKind, yKind, isEach) {
  const paths = method.runs.map((run) => pathOf(run, xKind)).filter(Boolean);
  if (paths.length < method.runs.length) return [];
  if (isEach) return paths.map((path) => pointsOf([path], yKind));
  return [pointsOf(paths, yKind)];
}
function pointsOf(paths, yKind) {
  const rows = paths.map((path) => new Map(path.course.step.map((step, row) => [step, row])));
  const steps = paths[0].course.step.filter((step) => rows.every((each) => each.has(step)));
  const points = [];
  for (const step of steps) {
    const at = paths.map((path, number) => [path, rows[number].get(step)]);
    const ys = at.map(([path, row]) => path.course[yKind][row]);
    if (ys.some((y) => y === null)) continue;
    const mid = (name) => mean(at.map(([path, row]) => path.course[name][row]));
    points.push({
      x: mean(at.map(([path, row]) => path.x[row])),
      y: mean(ys),
      spread: deviation(ys),
      step,
      bytes: mid("bytes"),
      isBetween: paths.some((path) => path.isBetween),
    });
  }
  return points;
}
