// Of the page about runs: heat maps of masks and of who holds what, and how clients fare.

/** The groups that a map is of: their names with their keys, or that all are meant. */
function namesOf(groups, more = "") {
  if (groups.length > 1 && groups.length === data.groups.length)
    return element("span", { class: "named" }, `all runs${more}`);
  return element(
    "span",
    { class: "several" },
    groups.map((group) => named(group, `${group.name}${more}`)),
  );
}

function density() {
  const masked = data.groups.flatMap((group) => group.density.map((one) => ({ group, ...one })));
  if (!masked.length)
    return section(
      "masks",
      "Where weights may change",
      "No run here has written down the density of masks: none has any, or they are older than this figure.",
    );
  const cellsOf = (one) =>
    Object.keys(one.blocks).length
      ? Object.entries(one.blocks).map(([label, row]) => ({ label, cells: LAYERS.map((name) => row[name] ?? null) }))
      : Object.entries(one.rest).map(([label, value]) => ({ label, cells: [value] }));
  const most = Math.max(...masked.flatMap((one) => cellsOf(one).flatMap((row) => row.cells)), 0.001);
  const alike = new Map(); // the same map, of how many groups it may be, is drawn once
  for (const one of masked.filter((one) => !state.hidden.has(one.group.name))) {
    const drawn = JSON.stringify([one.phase, one.blocks, one.rest]);
    alike.set(drawn, [...(alike.get(drawn) ?? []), one]);
  }
  const figures = [...alike.values()].map((same, k) => {
    const [one] = same,
      groups = same.map((one) => one.group);
    const hasBlocks = Object.keys(one.blocks).length > 0;
    const rest = Object.entries(one.rest)
      .filter(([, value]) => value !== null)
      .map(([name, value]) => `${name} ${percent(value)}`);
    const phase = data.groups.some((group) => group.phases.length > 1) ? `, phase ${one.phase}` : "";
    return numberedMap(
      `density-${one.group.order}-${k}`,
      namesOf(groups, phase),
      cellsOf(one),
      hasBlocks ? LAYERS : ["all"],
      most,
      {
        label: `Density of masks of ${listed(groups.map((group) => group.name))}${phase}, by block and kind of layer`,
        rowLabel: hasBlocks ? "block" : "layers",
        format: (value) => (100 * value).toFixed(value >= 0.0995 ? 0 : 1),
      },
      hasBlocks && rest.length > 0 && `Outside of the blocks: ${rest.join(", ")}.`,
    );
  });
  return section(
    "masks",
    "Where weights may change",
    "Per cent of each layer's weights that the masks leave free, the mean over the clients of the newest round that " +
      "wrote it down; of several seeds, of the first with the most rounds. The darker (in dark mode, the lighter), the denser.",
    element("div", { class: "grid" }, figures),
  );
}

function holdings() {
  const figures = data.splits.map((split, place) => {
    const all = data.groups.filter((group) => group.split === place),
      those = all.filter((group) => !state.hidden.has(group.name));
    if (!those.length) return null;
    const counts = split.rows.map((row) => {
      const cells = row.split(",").map(Number);
      return [...cells, ...Array(split.classes.length - cells.length).fill(0)];
    });
    const held = counts.map((row) => row.filter(Boolean).length).sort((a, b) => a - b);
    const more =
      split.count > counts.length
        ? `The first ${whole(counts.length)} of ${whole(split.count)} clients.`
        : `${plural(split.count, "client")}.`;
    const classes = held[0] === held.at(-1) ? "" : `${held[0]} to `;
    const about = `${more} A client holds ${classes}${plural(held.at(-1), "class")}.`;
    const tell = (client, label, count) => [
      element("b", {}, `client ${client}`),
      element("div", {}, `${split.classes[label]}: ${plural(count, "sample")}`),
    ];
    return denseMap(
      `split-${place}`,
      namesOf(those),
      counts,
      {
        label: `Samples by client and class. ${about}`,
        names: split.classes,
        xLabel: "class",
        yLabel: "client",
        tell,
      },
      about,
    );
  });
  const without = data.groups
    .filter((group) => group.split === null && !state.hidden.has(group.name))
    .map((group) => group.name);
  const note = without.length ? `Not known of ${without.join(", ")}: older than this figure.` : null;
  return section(
    "holdings",
    "Who holds which classes",
    `Training samples by client and class; of several seeds, the first. ${note ?? ""}`,
    element("div", { class: figures.length > 1 ? "grid" : null }, figures), // a single one has the page's width
  );
}

function fairness() {
  const told = shown().filter((group) => group.clients);
  if (!told.length)
    return section(
      "clients",
      "How clients fare",
      "Runs with evaluate.clients: true and at their end tell the accuracy of each client; none of those shown does.",
    );
  const bins = told[0].clients.histogram.length;
  const figures = told.map((group) => {
    const { histogram, count, mean, worst_tenth, deviation } = group.clients;
    const found = histogram.map((value, k) => ({
      label: `${Math.round((100 * k) / bins)}% to ${Math.round((100 * (k + 1)) / bins)}%`,
      values: [value],
      text: plural(value, "client"),
    }));
    const [typical, worst, spread] = [mean, worst_tenth, deviation].map((figure) => percent(figure[0]));
    const summary = `Mean ${typical}, worst tenth ${worst}, standard deviation ${spread}.`;
    return columns(
      `clients-${group.order}`,
      named(group),
      found,
      {
        label: `Accuracy of ${whole(count)} clients of ${group.name}. ${summary}`,
        xLabel: null,
        yFormat: whole,
        yLeast: 1,
        orders: [group.order],
        tall: 116,
        names: false,
        tick: (k) => (((100 * k) / bins) % 25 === 0 ? `${(100 * k) / bins}%` : null),
      },
      summary,
    );
  });
  return section(
    "clients",
    "How clients fare",
    "How many clients the final model serves how well: the accuracy of each on its own held-out samples or, without " +
      "any, by its share of classes.",
    element("div", { class: "grid small" }, figures),
  );
}
