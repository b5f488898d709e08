"use strict";
// Settings that differ between methods, those that do not, and every single run.

function drawSettings() {
  const { methods, shared } = state.task;
  const names = Object.keys(methods[0].settings);
  const words = (name) => name.replaceAll("_", " ");
  const parts = [];
  if (names.length)
    parts.push(
      plainTable(
        ["method", ...names.map(words)],
        methods.map((method) => [method.name, ...names.map((name) => method.settings[name])]),
        { texts: names.map((_, number) => number + 1), caption: "Settings that differ" },
      ),
    );
  else
    parts.push(
      make(
        "p",
        { class: "hint" },
        methods.length > 1 ? "The methods have the same settings." : "There is one method.",
      ),
    );
  parts.push(
    make(
      "details",
      {},
      make(
        "summary",
        {},
        `${plural(Object.keys(shared).length, "setting")} that all methods have alike`,
      ),
      make(
        "dl",
        {},
        Object.entries(shared).map(([name, value]) =>
          make("div", {}, make("dt", {}, words(name)), make("dd", {}, value)),
        ),
      ),
    ),
  );
  $("settings").replaceChildren(...parts);
}

function drawRuns() {
  const rows = state.task.methods.flatMap((method) => [
    ...method.runs.map((run) => [
      method.name,
      String(run.seed),
      formatScore(run.score),
      formatBytes(run.bytes_per_worker_step),
      formatTime(run.wall_time_s),
      run.engine,
      run.folder,
    ]),
    ...method.failed.map((run) => [
      method.name,
      String(run.seed),
      "no result",
      "–",
      "–",
      "–",
      run.folder,
    ]),
  ]);
  const details = tableDetails(`${plural(rows.length, "run")} with their folders`, () =>
    plainTable(
      [
        "method",
        "seed",
        `test ${scoreName()}`,
        "bytes per worker and step",
        "wall time",
        "engine",
        "folder",
      ],
      rows,
      { texts: [5, 6], caption: "Runs" },
    ),
  );
  $("runs").replaceChildren(details.details);
}

function drawFooter() {
  const runs = page.tasks.flatMap((task) => task.methods.flatMap((method) => method.runs));
  const versions = [
    ...new Set(
      runs.map(
        (run) =>
          `gradwire ${run.versions.gradwire}, torch ${run.versions.torch}, Python ${run.versions.python}, ${run.kernels} kernels`,
      ),
    ),
  ];
  const lines = [
    "± is the standard deviation over seeds. A time to a target is that of the first evaluation that reaches it; the target must be reached by all seeds. Bytes are those of packed payloads as sent.",
    "Virtual times come from the simulator's model of the network; the bandwidth is that of each node's network card. ≈ marks times between two recorded bandwidths: time is about computation + bytes / bandwidth, so it is interpolated linearly in 1 / bandwidth, and never beyond the recorded ones. Wall time is what a run took on the machine it ran on, with evaluations.",
    `Made by gradwire ${page.gradwire}. Runs: ${versions.join("; ") || "none"}. Charts: Chart.js (MIT licence).`,
  ];
  $("footer").replaceChildren(...lines.map((line) => make("p", {}, line)));
}
