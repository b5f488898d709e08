"use strict";
// Who is first, in three cards.

function drawSummary() {
  const { all } = figures();
  $("summary").replaceChildren(...[fastest(all), fewestBytes(all), best(all)].filter(Boolean));
}

function card(what, figure, each, more) {
  return make(
    "div",
    { class: "card" },
    make("div", { class: "what" }, what),
    make("div", { class: "figure" }, figure),
    each ? make("div", { class: "who" }, swatch(each.method), each.method.name) : null,
    make("div", { class: "more" }, more),
  );
}
const least = (all, key) =>
  all.filter((each) => each[key] !== null).sort((a, b) => a[key] - b[key])[0];

function fastest(all) {
  const goal = formatTarget();
  const what = `First at ${goal}${hasVirtual() && state.rate !== null ? ` at ${formatRate(state.rate)}` : ""}`;
  const first = least(all, "target");
  if (!first) return card(what, "–", null, `No method reaches ${goal} with all of its seeds.`);
  const about = first.isBetween ? "≈ " : "";
  return card(
    what,
    about + formatTime(first.target),
    first,
    compared(first, all, "target", "as fast as"),
  );
}

function fewestBytes(all) {
  const what = `Fewest bytes per worker to ${formatTarget()}`;
  const first = least(all, "bytesToTarget");
  if (!first) return null;
  return card(
    what,
    formatBytes(first.bytesToTarget),
    first,
    compared(first, all, "bytesToTarget", "fewer than"),
  );
}

/** In words: against the best run in fp32. */
function compared(each, all, key, words) {
  const bases = all.filter((other) => other.method.is_fp32);
  const base = least(bases, key) ?? bases[0];
  if (!base) return "";
  if (each === base) return "the baseline itself";
  if (base[key] === null) return `${base.method.name} does not get there`;
  return `${formatRatio(base[key] / each[key])} ${words} ${base.method.name}`;
}

function best(all) {
  const scored = all.filter((each) => each.score !== null);
  if (!scored.length) return null;
  const first = scored.reduce((one, other) => (isBetter(other.score, one.score) ? other : one));
  const spread = first.deviation ?? 0;
  const close = scored.filter(
    (each) => each !== first && Math.abs(each.score - first.score) <= spread,
  );
  const more =
    first.deviation === null
      ? "one seed: small differences mean nothing"
      : close.length
        ? `${plural(close.length, "other method is", "other methods are")} within its spread`
        : "no other method is within its spread";
  return card(
    `${state.lower ? "Lowest" : "Highest"} test ${scoreName()}`,
    formatScore(first.score),
    first,
    more,
  );
}
