"use strict";
// Numbers for people, rounded as in the program's own tables (fedsieve.observe.numbers, fedsieve.federate.traffic).

/** As Python's format does it: a number that lies just between two goes to the even one. */
function fixed(value, digits) {
  const halves = Math.abs(value) * 2 ** (digits + 1); // exact; odd only where the number lies just between two
  if (halves % 2 !== 1) return value.toFixed(digits);
  const below = Math.floor((halves * 5 ** digits) / 2),
    even = below % 2 ? below + 1 : below;
  return (value < 0 ? "-" : "") + (even / 10 ** digits).toFixed(digits);
}

const known = (format) => (value) => (value === null || value === undefined ? "–" : format(value));
const percent = known((value) => `${fixed(100 * value, 1)}%`);
const points = known((value) => `${fixed(100 * value, 1)} points`);
const decimals = known((value) => fixed(value, 3));
/** What no table has, such as drift, with four digits. */
const number = known((value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
});
const whole = (value) => value.toLocaleString("en-US");

const bytes = known((count) => {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${fixed(count, unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1000;
  }
  return `${fixed(count, 1)} TB`;
});

const duration = known((seconds) => {
  if (seconds < 60) return `${fixed(seconds, 1)} s`;
  const rounded = Number(fixed(seconds, 0)),
    minutes = Math.floor(rounded / 60),
    two = (count) => String(count).padStart(2, "0");
  return minutes < 60
    ? `${minutes} min ${two(rounded % 60)} s`
    : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
});

/** A mean ± half the width of its interval, and the unit once: 69.2 ± 3.4%. */
function withMargin(mean, margin, format) {
  if (margin === null || margin === undefined) return format(mean);
  const unit = /^([-+]?[\d.]+)(\D+)$/;
  let value = format(mean);
  const half = margin ? format(margin) : "0",
    [one, other] = [unit.exec(value), unit.exec(half)];
  if (one && other && one[2] === other[2]) value = one[1];
  return `${value} ± ${half}`;
}

/** A difference with its sign: +1.5 ± 0.4 points. */
const signed = (mean, margin, format) => (mean < 0 ? "-" : "+") + withMargin(Math.abs(mean), margin, format);

/** The same on an axis, where 100 kB and 1 min are enough. */
const onAxis = (format) => (value) => format(value).replace(/\.0(?=\D)| 00 (s|min)$/, "");

const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : /(s|x)$/.test(noun) ? "es" : "s"}`;
