// Of the page about runs: what changes from round to round, and what it costs.

const seriesOf = (field) =>
  shown()
    .filter((group) => group.curves[field])
    .map((group) => ({ name: group.name, order: group.order, seeds: group.seeds.length, ...group.curves[field] }));

/** Where phases begin, of all groups shown; the same beginning is marked once. */
function marks() {
  const found = new Map();
  for (const group of shown())
    for (const [name, start] of group.phases) found.set(start, [...new Set([...(found.get(start) ?? []), name])]);
  return [...found].map(([start, names]) => [names.join(" / "), start]);
}

function byRound(id, title, field, format, extra = {}) {
  const series = seriesOf(field);
  if (!series.length) return null;
  return lines(id, title, series, {
    label: `${extra.label ?? id} by round`,
    xLabel: "round",
    xFormat: whole,
    xLeast: 1,
    yFormat: format,
    marks: marks(),
    ...extra,
    at: (value, names) => `round ${whole(value)}${phasesAt(names, value)}`,
    range: state.range,
    where: inRounds,
    zoom: (range) => {
      state.range = range;
      render();
    },
  });
}

/** In which phases these groups are in a round, as far as any has several. */
function phasesAt(names, round) {
  const found = data.groups
    .filter((group) => names.includes(group.name) && group.phases.length > 1)
    .map((group) => group.phases.findLast(([, start]) => start <= round)[0]);
  return found.length ? `, ${[...new Set(found)].join(" / ")}` : "";
}

/** A title with buttons that choose which of several curves is shown, and which it is: another where none has it. */
function switched(id, title, fields) {
  const there = fields.filter((field) => shown().some((group) => group.curves[field]));
  const chosen = there.includes(state.choice[id]) ? state.choice[id] : there[0];
  const button = (field) =>
    element(
      "button",
      {
        type: "button",
        "aria-pressed": String(chosen === field),
        "data-key": `${id} ${field}`,
        onclick: () => {
          state.choice[id] = field;
          render();
        },
      },
      NAMES[field],
    );
  const caption = [
    element("span", {}, title),
    there.length > 1
      ? element("span", { class: "switch", role: "group", "aria-label": `${title}: which` }, there.map(button))
      : element("span", { class: "small" }, NAMES[chosen] ?? ""),
  ];
  return [caption, chosen];
}

function learning() {
  const accuracy = switched("accuracy", "Accuracy", ["val_accuracy", "test_accuracy"]),
    loss = switched("loss", "Loss", ["val_loss", "train_loss", "test_loss"]);
  const reset =
    state.range &&
    element(
      "button",
      {
        type: "button",
        "data-key": "reset",
        onclick: () => {
          state.range = null;
          render();
        },
      },
      "Show all rounds",
    );
  return section(
    "learning",
    "Learning",
    "Bands are 95% intervals over seeds, dotted lines the beginnings of phases. The scale of losses is logarithmic. " +
      "Point at a chart for its values; drag over rounds to look closer, double-click to see all again.",
    reset,
    element(
      "div",
      { class: "grid" },
      byRound("accuracy", ...accuracy, percent, {
        label: "Accuracy",
        floor: 0,
        ceiling: 1,
        yTick: onAxis(percent),
      }),
      byRound("loss", ...loss, decimals, { label: "Loss", floor: 0, isLogY: true, yTick: number }),
    ),
  );
}

function drift() {
  const charts = [
    byRound("drift", "Drift of a client", "drift_mean", number, { label: "Drift", floor: 0 }),
    byRound("cosine", "Cosine of clients' updates", "cosine", decimals, { label: "Cosine", yTick: number }),
  ];
  if (!charts.some(Boolean)) return null;
  return section(
    "drifting",
    "How clients drift",
    "Drift: the distance of a client's weights from those it received, on average over the round's clients. " +
      "Cosine: the mean over pairs of clients of the cosine of their updates, 1 if all pull the same way.",
    element("div", { class: "grid" }, charts),
  );
}

function cost() {
  const sent = shown()
    .filter((group) => group.sent)
    .map((group) => ({ name: group.name, order: group.order, seeds: group.seeds.length, ...group.sent }));
  const rows = shown()
    .filter((group) => group.time.length)
    .map((group) => ({ name: group.name, order: group.order, parts: group.time }));
  const charts = [
    sent.length > 0 &&
      lines("bytes", "Accuracy for bytes sent", sent, {
        label: "Validation accuracy against bytes sent",
        xLabel: "sent so far, up and down",
        xFormat: bytes,
        xTick: onAxis(bytes),
        yFormat: percent,
        isLog: true,
        floor: 0,
        ceiling: 1,
        yTick: onAxis(percent),
        at: bytes,
        beside: (one, k) => `round ${whole(one.round[k])}`,
      }),
    byRound("seconds", "Time of a round", "seconds", duration, { label: "Time", floor: 0, yTick: onAxis(duration) }),
    rows.length > 0 && bars("phases", "Time of phases", rows, duration, "Time in rounds; phases in their order."),
  ];
  return section("cost", "What it costs", null, element("div", { class: "grid" }, charts));
}
