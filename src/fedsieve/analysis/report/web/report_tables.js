// Of the page about runs: tables.

/** A table that scrolls by itself where it is too wide: `names` of columns, those in `texts` left-aligned. */
function table(label, names, rows, { texts = [], dense = false } = {}) {
  const side = (k) => (texts.includes(k) ? "text" : null);
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    element(
      "table",
      { class: dense ? "dense" : null },
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          names.map((name, k) => element("th", { scope: "col", class: side(k) }, name)),
        ),
      ),
      element("tbody", {}, rows),
    ),
  );
}

const textTable = (label, names, rows) =>
  table(
    label,
    names,
    rows.map((row) =>
      element(
        "tr",
        {},
        row.map((text, k) => element("td", { class: k ? "text wrap" : null }, text)),
      ),
    ),
    { texts: names.map((_, k) => k).slice(1), dense: true },
  );

/** A figure, [mean, margin, count], of a table; `show` makes text of its mean and margin. */
const cell = (figure, show, isLatest = false) =>
  element("td", { class: isLatest ? "latest" : null }, figure ? show(figure[0], figure[1]) : "–");
const withInterval = (format) => (mean, margin) => withMargin(mean, margin, format);
const meanOnly = (format) => (mean) => format(mean);

function headline() {
  const columns = {
    "test accuracy": ["test_accuracy", withInterval(percent)],
    "test loss": ["test_loss", withInterval(decimals)],
    validation: ["val_accuracy", withInterval(percent)],
    "best validation": ["best_val_accuracy", withInterval(percent)],
    "sent up": ["bytes_up", meanOnly(bytes)],
    time: ["seconds", meanOnly(duration)],
  };
  const areFinished = data.groups.every((group) => group.finished);
  const row = (group) =>
    element(
      "tr",
      { class: state.hidden.has(group.name) ? "off" : null },
      element("td", {}, named(group), !group.finished && element("span", { class: "badge narrow" }, group.state)),
      element("td", {}, group.seeds.length),
      Object.values(columns).map(([name, show]) => cell((group.latest ?? group.figures)[name], show, group.latest)),
      areFinished
        ? null
        : element("td", { class: "text" }, group.finished ? "finished" : element("span", { class: "badge" }, group.state)),
    );
  const names = ["run", "seeds", ...Object.keys(columns), ...(areFinished ? [] : ["state"])];
  const latest = data.groups.some((group) => group.latest) ? " Figures in italics are the latest of unfinished runs." : "";
  return section(
    "results",
    "Results",
    `Means over seeds of finished runs; bytes from clients to server and time are those of one run.${latest}`,
    table("Table of results", names, data.groups.map(row), { texts: areFinished ? [] : [names.length - 1] }),
  );
}

/** Did a phase help? Its accuracy before and after, and what it cost. */
function gains() {
  const there = shown().filter((group) => group.gains.length);
  if (!there.some((group) => group.gains.length > 1)) return null;
  const scores = ["val", "test"];
  const isDoubtful = ([mean, margin]) => margin === null || Math.abs(mean) <= margin; // one seed has no interval
  const gain = (figure) =>
    element(
      "td",
      { class: figure && !isDoubtful(figure) && (figure[0] > 0 ? "better" : "worse") },
      figure ? signed(figure[0], figure[1], (value) => fixed(100 * value, 1)) : "–",
    );
  const row = (group, phase, k) =>
    element(
      "tr",
      { class: k ? null : "first" },
      element("td", {}, k ? "" : named(group)),
      element("td", { class: "text" }, phase.name),
      element("td", {}, `${number(phase.rounds[0])}${phase.of === null ? "" : ` of ${whole(phase.of)}`}`),
      scores.map((score) => [
        cell(phase[score].before, meanOnly(percent)),
        cell(phase[score].after, meanOnly(percent), phase.of !== null),
        gain(phase[score].gain),
      ]),
      cell(phase.bytes_up, meanOnly(bytes)),
      cell(phase.bytes_down, meanOnly(bytes)),
      cell(phase.seconds, meanOnly(duration)),
    );
  const names = ["run", "phase", "rounds"];
  for (const score of ["validation", "test"]) names.push(`${score} before`, "after", "gain");
  names.push("sent up", "sent down", "time");
  return section(
    "gains",
    "Phase by phase",
    "Accuracy before and after each phase, means over seeds, and the gain in percentage points with its 95% interval, " +
      "in colour where that does not hold 0. Nothing is measured before the first phase.",
    table(
      "Table of phases",
      names,
      there.flatMap((group) => group.gains.map((phase, k) => row(group, phase, k))),
      { texts: [1], dense: true },
    ),
  );
}
