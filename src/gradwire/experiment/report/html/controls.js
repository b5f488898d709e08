"use strict";
// The bar on top: task, bandwidth, target. What it sets holds for the whole page.

function drawControls() {
  const parts = [];
  if (page.tasks.length > 1) parts.push(taskControl());
  if (hasVirtual()) parts.push(rateControl());
  if (state.task.methods.some((method) => method.runs.length)) parts.push(targetControl());
  $("controls").replaceChildren(...parts);
  $("controls").hidden = !parts.length;
}

function taskControl() {
  const choices = page.tasks.map((task, number) => [String(number), task.name]);
  const choose = (value) => openTask(page.tasks[Number(value)]);
  const list = select("Task", choices, String(page.tasks.indexOf(state.task)), choose);
  list.id = "task";
  const name = make("div", { class: "name" }, make("span", {}, "Task"));
  return make("div", { class: "control narrow" }, name, list);
}

function rateControl() {
  const rates = recordedRates();
  const value = make("output", { class: "value", id: "rate-value" });
  const name = make("div", { class: "name" }, make("label", { for: "rate" }, "Bandwidth"), value);
  if (rates.length < 2) {
    value.textContent = rates.length ? formatRate(rates[0]) : "that of each run";
    const hint = "Runs have recorded no other bandwidth: give what_if to move a slider here.";
    return make("div", { class: "control" }, name, make("p", { class: "hint" }, hint));
  }
  const place = (rate) => Math.log10(rate);
  const slider = make("input", {
    type: "range",
    id: "rate",
    min: place(rates[0]),
    max: place(rates.at(-1)),
    step: "any",
    oninput: () => set(nearby(10 ** Number(slider.value))),
    onkeydown: (event) => keys(event),
  });
  const pills =
    rates.length > 8
      ? []
      : rates.map((rate) =>
          make(
            "button",
            { type: "button", class: "pill", onclick: () => set(rate) },
            formatRate(rate),
          ),
        );
  const nearby = (rate) => rates.find((each) => Math.abs(Math.log(each / rate)) < 0.03) ?? rate;
  const show = () => {
    const isRecorded = rates.some((each) => isSame(each, state.rate));
    slider.value = place(state.rate);
    value.textContent = formatRate(state.rate) + (isRecorded ? "" : ", interpolated");
    slider.setAttribute("aria-valuetext", value.textContent);
    pills.forEach((pill, number) =>
      pill.setAttribute("aria-pressed", isSame(rates[number], state.rate)),
    );
  };
  const set = (rate) => {
    state.rate = Math.min(rates.at(-1), Math.max(rates[0], rate));
    show();
    changed();
  };
  const keys = (event) => {
    // twenty steps to a decade
    const way = {
      ArrowRight: 1,
      ArrowUp: 1,
      ArrowLeft: -1,
      ArrowDown: -1,
      PageUp: 5,
      PageDown: -5,
    }[event.key];
    if (!way) return;
    event.preventDefault();
    set(10 ** (Math.round(20 * place(state.rate) + way) / 20));
  };
  show();
  return make(
    "div",
    { class: "control" },
    name,
    slider,
    make("div", { class: "pills", role: "group", "aria-label": "Recorded bandwidths" }, pills),
  );
}

function targetControl() {
  const factor = isAccuracy() ? 100 : 1;
  const step = targetStep() * factor;
  const { low, high } = scoreRange();
  const clean = (value) => Number(value.toPrecision(6));
  const bounds = {
    min: clean(Math.floor((low * factor) / step) * step),
    max: clean(Math.ceil((high * factor) / step) * step),
  };
  const number = make("input", {
    type: "number",
    id: "target",
    step: "any",
    onchange: () => set(number),
  });
  const slider = make("input", {
    type: "range",
    id: "target-slider",
    "aria-label": `Target ${scoreName()}`,
    ...bounds,
    step,
    oninput: () => set(slider),
  });
  const set = (from) => {
    if (from.value === "" || !Number.isFinite(Number(from.value))) return show();
    state.target = clean(Number(from.value) / factor);
    show();
    changed();
  };
  const show = () => {
    slider.value = number.value = clean(state.target * factor);
    slider.setAttribute("aria-valuetext", formatTarget());
  };
  show();
  const unit = isAccuracy() ? [make("span", {}, "%")] : [];
  const way = isAccuracy()
    ? []
    : [
        select(
          "Better",
          [
            ["higher", "higher is better"],
            ["lower", "lower is better"],
          ],
          state.lower ? "lower" : "higher",
          (value) => {
            state.lower = value === "lower";
            drawControls();
            changed();
            $("better").focus();
          },
        ),
      ];
  if (way.length) way[0].id = "better";
  const name = make(
    "div",
    { class: "name" },
    make(
      "label",
      { for: "target" },
      `Target: test ${scoreName()} of at ${state.lower ? "most" : "least"}`,
    ),
    way,
  );
  return make(
    "div",
    { class: "control" },
    name,
    make("div", { class: "row" }, slider, number, unit),
  );
}

/** Sets the theme: that of the system until the reader chooses one. */
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
  useTheme();
}
const stored = {
  get() {
    try {
      return localStorage.getItem("gradwire-theme");
    } catch {
      return null;
    }
  },
  set(theme) {
    try {
      localStorage.setItem("gradwire-theme", theme);
    } catch {
      /* a page without storage */
    }
  },
};
function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => stored.get() ?? (dark.matches ? "dark" : "light");
  setTheme(preferred());
  dark.addEventListener("change", () => {
    setTheme(preferred());
    drawAll();
  });
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    stored.set(theme);
    setTheme(theme);
    drawAll();
  });
}
