"use strict";
// The table of methods: sorted by the buttons in its head, filtered by words.

const MOST_ROWS = 20; // more are scrolled

function columns() {
  const at = state.rate === null ? "" : ` at ${formatRate(state.rate)}`;
  const goal = formatTarget();
  const time = (value) => formatTime(value);
  return [
    { key: "name", title: "Method" },
    { key: "score", title: `Test ${scoreName()}`, down: !state.lower, best: true },
    { key: "runs", title: "Runs", cell: (each) => String(each.runs) },
    {
      key: "bytes",
      title: "Bytes per worker and step",
      cell: (each) => formatBytes(each.bytes),
      meter: true,
      best: true,
    },
    {
      key: "fp32",
      title: "Fewer than fp32",
      cell: (each) => (each.fp32 === null ? "–" : formatRatio(each.fp32)),
      down: true,
      hint: (each) => each.fp32 !== null && `bytes of ${each.method.base_fp32} over its own`,
    },
    {
      key: "fp16",
      title: "Fewer than fp16",
      cell: (each) => (each.fp16 === null ? "–" : formatRatio(each.fp16)),
      down: true,
      hint: (each) => each.fp16 !== null && `bytes of ${each.method.base_fp16} over its own`,
    },
    ...(hasVirtual()
      ? [
          {
            key: "time",
            title: `Virtual time${at}`,
            cell: (each) => about(each, each.time, time),
            meter: true,
            best: true,
            hint: whyNoTime,
          },
        ]
      : []),
    ...(hasMeasured()
      ? [
          {
            key: "measured",
            title: "Measured time of training",
            cell: (each) => (each.measured === null ? "–" : time(each.measured)),
            meter: true,
            best: true,
          },
        ]
      : []),
    {
      key: "target",
      title: `Time to ${goal}`,
      cell: (each) => (each.target === null ? unreached(each) : about(each, each.target, time)),
      meter: true,
      best: true,
    },
    { key: "wall", title: "Wall time of a run", cell: (each) => time(each.wall) },
  ];
}
const about = (each, value, format) =>
  value === null ? "–" : (each.isBetween ? "≈ " : "") + format(value);
const whyNoTime = (each) =>
  each.time === null &&
  (each.method.runs[0].courses.length > 1
    ? "What this method does depends on the network: it has times at recorded bandwidths only."
    : "This bandwidth is outside those that its runs have recorded.");
const unreached = (each) => (each.numReached ? `${each.numReached} of ${each.runs} runs` : "–");

function sorted(rows) {
  const { key, down } = state.sort;
  if (!key) return rows;
  const value = (each) => (key === "name" ? each.method.name.toLowerCase() : each[key]);
  const compare = (a, b) => {
    if (a === b) return 0;
    if (a === null || b === null) return a === null ? 1 : -1; // what has no value comes last
    return (a < b ? -1 : 1) * (down ? -1 : 1);
  };
  return [...rows].sort((a, b) => compare(value(a), value(b)));
}

function drawFilters() {
  const words = make("input", {
    type: "search",
    id: "filter",
    placeholder: "Filter by words",
    "aria-label": "Filter methods by words",
    oninput: () => {
      state.words = words.value;
      changed();
    },
  });
  words.value = state.words;
  const only = select(
    "Which methods",
    [
      ["all", "all methods"],
      ["target", "those that reach the target"],
      ["front", "those on the Pareto front"],
    ],
    state.only,
    (value) => {
      state.only = value;
      changed();
    },
  );
  only.id = "only";
  $("filters").replaceChildren(
    make("span", { id: "count", class: "hint", "aria-live": "polite" }),
    words,
    only,
  );
}

function drawTable() {
  const { all, left, failed } = figures();
  const shown = columns();
  const bests = new Map(
    shown.filter((column) => column.best).map((column) => [column.key, bestOf(left, column)]),
  );
  const largest = new Map(
    shown
      .filter((column) => column.meter)
      .map((column) => [column.key, Math.max(...known(left.map((each) => each[column.key])))]),
  );
  const body = sorted(left).map((each) =>
    make(
      "tr",
      {},
      shown.map((column) => cell(each, column, bests, largest)),
    ),
  );
  for (const method of failed)
    body.push(
      make(
        "tr",
        {},
        make("th", { scope: "row" }, method.name),
        make(
          "td",
          { class: "text bad", colspan: shown.length - 1 },
          method.failures[0].split(":")[0],
        ),
      ),
    );
  if (!body.length)
    body.push(
      make(
        "tr",
        {},
        make("td", { class: "empty", colspan: shown.length }, "No method is left by the filter."),
      ),
    );
  const active = document.activeElement?.closest?.("#table th")?.dataset.key;
  const table = make(
    "table",
    { "aria-label": "Methods" },
    make("thead", {}, make("tr", {}, shown.map(head))),
    make("tbody", {}, body),
  );
  const old = $("table").firstElementChild;
  const place = [old?.scrollLeft ?? 0, old?.scrollTop ?? 0];
  const isLong = body.length > MOST_ROWS;
  const scroll = make(
    "div",
    {
      class: isLong ? "scroll long" : "scroll",
      tabindex: "0",
      role: "region",
      "aria-label": "Methods",
    },
    table,
  );
  $("table").replaceChildren(scroll);
  [scroll.scrollLeft, scroll.scrollTop] = place;
  if (active) $("table").querySelector(`th[data-key="${active}"] .sort`)?.focus();
  const total = all.length + state.task.methods.filter((method) => !method.runs.length).length;
  $("count").textContent = `${left.length + failed.length} of ${plural(total, "method")}`;
  drawNotes();
}

function head(column) {
  const isSorted = state.sort.key === column.key;
  const sort = () => {
    state.sort = { key: column.key, down: isSorted ? !state.sort.down : (column.down ?? false) };
    drawTable();
  };
  const order = isSorted ? (state.sort.down ? "descending" : "ascending") : null;
  return make(
    "th",
    { scope: "col", "aria-sort": order, "data-key": column.key },
    make("button", { type: "button", class: "sort", onclick: sort }, column.title),
  );
}

function bestOf(rows, column) {
  const usable = rows.filter((each) => each[column.key] !== null);
  const sign = column.key === "score" && !state.lower ? -1 : 1;
  usable.sort((a, b) => sign * (a[column.key] - b[column.key]));
  return usable.length > 1 ? usable[0] : null;
}

function cell(each, column, bests, largest) {
  if (column.key === "name")
    return make(
      "th",
      { scope: "row" },
      make("div", { class: "method" }, toggle(each.method), make("span", {}, each.method.name)),
    );
  const value = each[column.key];
  const best = bests.get(column.key) ?? null;
  const text = column.cell ?? ((row) => formatScore(row.score));
  const isBest = value !== null && best !== null && text(each) === text(best); // as it is read
  const content = column.key === "score" ? scoreCell(each) : [column.cell(each)];
  if (column.meter && value !== null) {
    const meter = make("span", { class: "meter", "aria-hidden": "true" });
    meter.style.width = `${(100 * value) / largest.get(column.key)}%`;
    content.push(meter);
  }
  return make("td", { class: isBest ? "best" : null, title: column.hint?.(each) || null }, content);
}

function scoreCell(each) {
  if (each.score === null) return ["NaN"];
  if (each.deviation === null) return [formatScore(each.score)];
  const spread = isAccuracy() ? (100 * each.deviation).toFixed(1) : digits(each.deviation, 2);
  return [formatScore(each.score), make("span", { class: "spread" }, ` ± ${spread}`)];
}

/** A button that shows or hides a method in the charts. */
function toggle(method) {
  const isShown = !state.hidden.has(method);
  return make(
    "button",
    {
      type: "button",
      class: "toggle",
      "aria-pressed": isShown,
      "aria-label": `${method.name} in the charts`,
      title: "show or hide in the charts",
      onclick: (event) => {
        switchMethod(method);
        event.currentTarget.setAttribute("aria-pressed", !state.hidden.has(method));
      },
    },
    swatch(method),
  );
}

function drawNotes() {
  const lines = [];
  for (const method of state.task.methods) {
    for (const note of method.notes) lines.push(`${method.name} ${note}`);
    for (const reason of method.failures) {
      const failed = method.failed.filter((run) => run.why === reason).length;
      lines.push(
        make(
          "span",
          { class: "bad" },
          `${method.name}: ${failed} of ${plural(method.runs.length + method.failed.length, "run")} ${reason}`,
        ),
      );
    }
  }
  if (page.unfinished)
    lines.push(
      `${plural(page.unfinished, "run has", "runs have")} not ended and ${page.unfinished === 1 ? "is" : "are"} left out.`,
    );
  $("notes").replaceChildren(...lines.map((line) => make("li", {}, line)));
}
