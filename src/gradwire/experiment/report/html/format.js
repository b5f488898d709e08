"use strict";
// Numbers and units as text.

const digits = (value, count = 3) =>
  Number(value.toPrecision(count)).toLocaleString("en-US", { maximumFractionDigits: 12 });

function scaled(value, units) {
  const size = Math.abs(value);
  const [factor, unit] = units.find(([least]) => size >= least * 0.9995) ?? units.at(-1);
  return `${digits(value / factor)}\u00a0${unit}`;
}

function formatTime(seconds) {
  if (seconds === 0) return "0\u00a0s";
  if (seconds >= 7200) return `${digits(seconds / 3600)}\u00a0h`;
  if (seconds >= 300) return `${digits(seconds / 60)}\u00a0min`;
  return scaled(seconds, [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "µs"],
    [1e-9, "ns"],
  ]);
}

const formatBytes = (count) =>
  count < 1000
    ? `${digits(count)}\u00a0B`
    : scaled(count, [
        [1e12, "TB"],
        [1e9, "GB"],
        [1e6, "MB"],
        [1e3, "kB"],
      ]);

const formatRate = (bits) =>
  scaled(bits, [
    [1e12, "Tbit/s"],
    [1e9, "Gbit/s"],
    [1e6, "Mbit/s"],
    [1e3, "kbit/s"],
    [1, "bit/s"],
  ]);

const formatRatio = (ratio) =>
  `${ratio >= 100 ? Math.round(ratio).toLocaleString("en-US") : digits(ratio)}×`;

const plural = (count, one, many = `${one}s`) =>
  `${count.toLocaleString("en-US")} ${count === 1 ? one : many}`;
