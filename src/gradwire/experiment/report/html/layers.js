"use strict";
// Bytes of each tensor, one point for each method.

const layers = frame(
  "layers",
  "",
  () => [],
  () => {
    const { drawn } = figures();
    if (!drawn.length)
      return { empty: "No method is chosen: press one of the buttons above the curves." };
    const rows = drawn.map(({ method }) => ({ method, bytes: meanBytes(method) }));
    const names = [...new Set(rows.flatMap(({ bytes }) => [...bytes.keys()]))].sort((a, b) =>
      a.localeCompare(b, "en", { numeric: true }),
    );
    const table = () =>
      plainTable(
        ["tensor", ...rows.map(({ method }) => method.name)],
        names.map((name) => [
          name,
          ...rows.map(({ bytes }) => (bytes.has(name) ? formatBytes(bytes.get(name)) : "–")),
        ]),
        { caption: "Bytes per worker and step by tensor" },
      );
    if (names.length < 2)
      return {
        empty: [
          "Here all of a model travels as one message, so there are no bytes by layer. To see them, let layers travel one by one: ",
          make("code", {}, 'scheduling = "wfbp"'),
          ".",
        ],
      };
    const values = rows.flatMap(({ bytes }) => [...bytes.values()]).filter((value) => value > 0);
    return {
      height: `${Math.max(14, 5 + 1.7 * names.length)}rem`,
      config: {
        type: "scatter",
        data: { datasets: rows.map(({ method, bytes }) => layerDataset(method, bytes)) },
        options: {
          interaction: { mode: "nearest", axis: "xy", intersect: false },
          scales: {
            x: axis("bytes per worker and step", formatBytes, {
              log: true,
              ...padded(values, true, 0.04),
            }),
            y: {
              type: "category",
              labels: names,
              offset: true,
              grid: { drawTicks: false },
              border: { display: false },
              ticks: { autoSkip: false, callback: (_, number) => shortened(names[number]) },
            },
          },
          plugins: {
            tooltip: {
              callbacks: {
                title: ([item]) => item?.dataset.method.name ?? "",
                label: ({ raw }) => `${raw.y}: ${formatBytes(raw.x)} per worker and step`,
                labelPointStyle: pointStyle,
                labelColor: labelColour,
              },
            },
          },
        },
      },
      text: `Bytes per worker and step of ${plural(names.length, "tensor")} with ${plural(rows.length, "method")}. The table below has the same values.`,
      table,
    };
  },
);

const shortened = (name) => (name.length > 24 ? `${name.slice(0, 10)}…${name.slice(-13)}` : name);

function meanBytes(method) {
  const found = new Map();
  for (const run of method.runs)
    for (const [name, bytes] of Object.entries(run.by_tensor))
      found.set(name, (found.get(name) ?? 0) + bytes / method.runs.length);
  return found;
}

function layerDataset(method, bytes) {
  const { colour, marker, rotation } = styleOf(method);
  return {
    method,
    data: [...bytes]
      .filter(([, count]) => count > 0)
      .map(([name, count]) => ({ x: count, y: name })),
    pointStyle: marker,
    pointRotation: rotation,
    pointRadius: 5.5,
    pointHoverRadius: 8,
    pointHitRadius: 10,
    borderColor: colour,
    borderWidth: 2,
    backgroundColor: faded(colour, 0.8),
  };
}
