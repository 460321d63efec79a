// Curves that lie on each other for a while: those on top are dashed there, so that all of them are seen.

const DASH = 7; // pixels
const NAMED = 3; // curves at most in a sentence

/**
 * Of each series, for every step from one of its points to the next: which series take the same step, as places in
 * `series`, itself among them.
 */
function sharedSteps(series) {
  const at = new Map(); // which series go through a point
  const key = (one, k) => `${one.x[k]} ${one.y[k]}`;
  series.forEach((one, place) =>
    one.x.forEach((_, k) => at.set(key(one, k), [...(at.get(key(one, k)) ?? []), place])),
  );
  return series.map((one) =>
    one.x.slice(1).map((_, k) => {
      const next = at.get(key(one, k + 1));
      return at.get(key(one, k)).filter((place) => next.includes(place));
    }),
  );
}

/** Pieces of a curve: {from, to: places of points, dashes: attributes of the line}. */
function pieces(place, steps) {
  const found = [];
  steps.forEach((together, k) => {
    const rank = together.indexOf(place),
      name = rank ? together.join() : ""; // whoever is first there is drawn in full
    if (found.at(-1)?.name === name) found.at(-1).to = k + 1;
    else found.push({ from: k, to: k + 1, name, rank, count: together.length });
  });
  return found.map(({ from, to, rank, count }) => ({
    from,
    to,
    dashes: rank
      ? { "stroke-dasharray": `${DASH} ${DASH * (count - 1)}`, "stroke-dashoffset": -DASH * (rank - 1) }
      : null,
  }));
}

/** Whether the k-th of the points that get a marker gets one, where several series would put theirs. */
function hasMarker(place, together, k) {
  return !together || together.length < 2 || k % together.length === together.indexOf(place);
}

/** `a and b are the same as c in rounds 1 to 30`, of series that take two steps or more with an earlier one. */
function aboutOverlaps(series, range = null) {
  const told = new Map(); // the same as what, and where: who
  sharedSteps(series).forEach((steps, place) => {
    const first = steps.map((together) => (together[0] < place ? together[0] : null)),
      one = series[place];
    for (const other of new Set(first.filter((k) => k !== null))) {
      const parts = stretches(first.map((k) => (k === other ? k : null))).filter((part) => part.length > 1);
      const isAll = one.x.length === series[other].x.length && first.every((k) => k === other);
      const ends = parts.map((part) => [one.x[part[0]], one.x[part.at(-1) + 1]]);
      const text = `the same as ${series[other].name}${isAll ? "" : ` ${range ? range(ends) : "in part"}`}`;
      if (parts.length) told.set(text, [...(told.get(text) ?? []), one.name]);
    }
  });
  const all = [...told].map(([text, names]) => `${listed(names)} ${names.length > 1 ? "are" : "is"} ${text}`);
  return all.length ? `Dashed where curves lie on each other: ${all.join("; ")}.` : null;
}

/** `a, b and c`, or `a, b and 7 others`. */
function listed(names) {
  const last = names.length > NAMED ? `${names.length - NAMED + 1} others` : names.at(-1);
  return [names.slice(0, Math.min(names.length, NAMED) - 1).join(", "), last].filter(Boolean).join(" and ");
}

const inRounds = (parts) => `in rounds ${parts.map(([from, to]) => `${whole(from)} to ${whole(to)}`).join(", ")}`;
