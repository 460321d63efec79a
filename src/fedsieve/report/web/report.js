// The page about runs. `state` is what the reader did; everything else follows from it and the data, so that a page that
// is served while runs go on can be drawn anew with new data and looks as it was left.

const state = { hidden: new Set(), open: new Set(), choice: { accuracy: "val_accuracy", loss: "val_loss" }, range: null };
const NAMES = { val_accuracy: "validation", test_accuracy: "test", val_loss: "validation", test_loss: "test", train_loss: "training" };
const LAYERS = ["q", "k", "v", "proj", "fc1", "fc2", "norms", "all"];
let data = JSON.parse(document.getElementById("data").textContent);

function render() {
  data.groups.forEach((group, order) => { group.order = order; });
  fill([header(), warnings(), data.groups.length ? report() : waiting(), footer()]);
}

function report() {
  return [
    legend(), headline(), learning(), drift(), cost(), density(), holdings(), fairness(), settings(), commands(),
  ];
}

const shown = () => data.groups.filter((group) => !state.hidden.has(group.name));
const named = (group, text = group.name) => element("span", { class: "named" }, key(group.order), element("span", {}, text));

function header() {
  const runs = data.groups.reduce((sum, group) => sum + group.seeds.length, 0);
  const unlike = (field) => [...new Set(data.groups.map((group) => group[field]))].join(", ");
  const about = runs ? `${plural(runs, "run")} in ${plural(data.groups.length, "group")}; ${unlike("data")}; ${unlike("backbone")}` : null;
  const live = location.protocol.startsWith("http") && data.live;
  return element("header", {},
    element("div", {},
      element("h1", {}, data.title),
      about && element("p", { class: "about" }, about),
      live && element("p", { class: "about live", id: "live" }, "Drawn anew as the runs go on.")),
    themeButton());
}

const warnings = () => data.warnings.length > 0 && element("div", { class: "warnings", role: "note" }, data.warnings.map((text) => element("p", {}, `Warning: ${text}`)));
const waiting = () => element("p", { class: "about", id: "waiting" }, "Waiting for a run: none has been written here yet.");
const footer = () => element("footer", {}, `Made by fedsieve ${data.version}. ± and bands are 95% intervals of the mean over seeds (Student's t); a single seed has none.`);

function section(id, title, note, ...content) {
  return element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), note && element("p", { class: "note" }, note), content);
}

// ----------------------------------------------------------------------------------------- which runs are shown

function legend() {
  const toggle = (name) => { state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name); render(); };
  return element("div", { class: "legend", role: "group", "aria-label": "Runs to show" },
    data.groups.map((group) =>
      element("button", { type: "button", "aria-pressed": String(!state.hidden.has(group.name)), "data-key": `legend ${group.name}`, title: "Show or hide in all charts", onclick: () => toggle(group.name) },
        key(group.order), element("span", {}, group.name))));
}

function headline() {
  const cell = (figure, format) => figure
    ? element("td", {}, format(figure[0]), figure[1] !== null && element("span", { class: "margin" }, ` ± ${format(figure[1])}`))
    : element("td", {}, "–");
  const row = (group) => element("tr", { class: state.hidden.has(group.name) ? "off" : null },
    element("td", {}, named(group)),
    element("td", {}, group.seeds.length),
    cell(group.figures.test_accuracy, percent), cell(group.figures.test_loss, (value) => value.toFixed(3)), cell(group.figures.best_val_accuracy, percent),
    element("td", {}, group.figures.bytes_up ? bytes(group.figures.bytes_up[0]) : "–"),
    element("td", {}, group.figures.seconds ? duration(group.figures.seconds[0]) : "–"),
    element("td", { class: "text" }, group.finished ? "finished" : element("span", { class: "badge" }, group.state)));
  const names = ["run", "seeds", "test accuracy", "test loss", "best validation", "sent up", "time"];
  return section("results", "Results", "Means over seeds of finished runs; bytes from clients to server and time are those of one run.",
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of results" },
      element("table", {},
        element("thead", {}, element("tr", {}, names.map((name) => element("th", { scope: "col" }, name)), element("th", { scope: "col", class: "text" }, "state"))),
        element("tbody", {}, data.groups.map(row)))));
}

// ------------------------------------------------------------------------------------------------- by round

const seriesOf = (field) => shown().filter((group) => group.curves[field]).map((group) => ({ name: group.name, order: group.order, ...group.curves[field] }));

/** Where phases begin, of all groups shown; the same beginning is marked once. */
function marks() {
  const found = new Map();
  for (const group of shown()) for (const [name, start] of group.phases) found.set(start, [...new Set([...(found.get(start) ?? []), name])]);
  return [...found].map(([start, names]) => [names.join(" / "), start]);
}

function byRound(id, title, field, format, extra = {}) {
  const series = seriesOf(field);
  if (!series.length) return null;
  return lines(id, title, series, {
    label: `${extra.label ?? id} by round`, xLabel: "round", xFormat: (value) => whole(value), yFormat: format, marks: marks(), ...extra,
    at: (value, one, k) => `round ${whole(value)}${phaseAt(one.name, value)}`,
    range: state.range, zoom: (range) => { state.range = range; render(); },
  });
}

function phaseAt(name, round) {
  const phases = data.groups.find((group) => group.name === name).phases;
  return phases.length > 1 ? `, ${phases.filter(([, start]) => start <= round).at(-1)?.[0] ?? ""}` : "";
}

/** A title with buttons that choose which of several curves is shown. */
function switched(id, title, fields) {
  const there = fields.filter((field) => data.groups.some((group) => group.curves[field]));
  if (!there.includes(state.choice[id])) state.choice[id] = there[0];
  const button = (field) => element("button", { type: "button", "aria-pressed": String(state.choice[id] === field), "data-key": `${id} ${field}`, onclick: () => { state.choice[id] = field; render(); } }, NAMES[field]);
  return [element("span", {}, title), there.length > 1 ? element("span", { class: "switch", role: "group", "aria-label": `${title}: which` }, there.map(button)) : element("span", { class: "small" }, NAMES[there[0]] ?? "")];
}

function learning() {
  const accuracy = switched("accuracy", "Accuracy", ["val_accuracy", "test_accuracy"]), loss = switched("loss", "Loss", ["val_loss", "train_loss", "test_loss"]);
  const whole = (value) => `${Number((100 * value).toFixed(2))}%`;
  const reset = state.range && element("button", { type: "button", "data-key": "reset", onclick: () => { state.range = null; render(); } }, "Show all rounds");
  return section("learning", "Learning", "Bands are 95% intervals over seeds, dotted lines the beginnings of phases. Point at a chart for its values; drag over rounds to look closer, double-click to see all again.", reset,
    element("div", { class: "grid" },
      byRound("accuracy", accuracy, state.choice.accuracy, percent, { label: "Accuracy", floor: 0, ceiling: 1, yTick: whole }),
      byRound("loss", loss, state.choice.loss, number, { label: "Loss", floor: 0 })));
}

function drift() {
  const charts = [byRound("drift", "Drift of a client", "drift_mean", number, { label: "Drift", floor: 0 }), byRound("cosine", "Agreement of clients", "cosine", number, { label: "Cosine" })];
  if (!charts.some(Boolean)) return null;
  return section("drifting", "How clients drift", "Drift: the distance of a client's weights from those it received, on average over the round's clients. Agreement: the mean cosine between two clients' updates, 1 if all pull the same way.", element("div", { class: "grid" }, charts));
}

function cost() {
  const sent = shown().filter((group) => group.sent).map((group) => ({ name: group.name, order: group.order, ...group.sent }));
  const rows = shown().filter((group) => group.time.length).map((group) => ({ name: group.name, order: group.order, parts: group.time }));
  const charts = [
    sent.length > 0 && lines("bytes", "Accuracy for bytes sent", sent, {
      label: "Validation accuracy against bytes sent", xLabel: "sent so far, up and down", xFormat: bytes, yFormat: percent, isLog: true, floor: 0, ceiling: 1,
      yTick: (value) => `${Number((100 * value).toFixed(2))}%`, at: (value, one, k) => `${bytes(value)}, round ${one.round[k]}`,
    }),
    byRound("seconds", "Time of a round", "seconds", duration, { label: "Time", floor: 0 }),
    rows.length > 0 && bars("phases", "Time of phases", rows, duration, "Time in rounds; phases from left to right."),
  ];
  return section("cost", "What it costs", null, element("div", { class: "grid" }, charts));
}

// ------------------------------------------------------------------------------------------------ heat maps

function density() {
  const masked = data.groups.flatMap((group) => group.density.map((one) => ({ group, ...one })));
  if (!masked.length) return section("masks", "Where weights may change", "No run here has written down the density of masks: none has any, or they are older than this figure.");
  const cellsOf = (one) => (Object.keys(one.blocks).length ? Object.entries(one.blocks).map(([label, row]) => ({ label, cells: LAYERS.map((name) => row[name] ?? null) })) : Object.entries(one.rest).map(([label, value]) => ({ label, cells: [value] })));
  const most = Math.max(...masked.flatMap((one) => cellsOf(one).flatMap((row) => row.cells)), 0.001);
  const figures = masked.filter((one) => !state.hidden.has(one.group.name)).map((one, k) => {
    const hasBlocks = Object.keys(one.blocks).length > 0;
    const rest = Object.entries(one.rest).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${percent(value)}`);
    const phase = data.groups.some((group) => group.phases.length > 1) ? `, phase ${one.phase}` : "";
    return numberedMap(`density-${one.group.order}-${k}`, named(one.group, `${one.group.name}${phase}`), cellsOf(one), hasBlocks ? LAYERS : ["all"], most, {
      label: `Density of masks of ${one.group.name}${phase}, by block and kind of layer`, rowLabel: hasBlocks ? "block" : "layers",
      format: (value) => (100 * value).toFixed(value >= 0.0995 ? 0 : 1),
    }, hasBlocks && rest.length > 0 && `Outside of the blocks: ${rest.join(", ")}.`);
  });
  return section("masks", "Where weights may change", "Per cent of each layer's weights that the masks leave free, the mean over the clients of the newest round that wrote it down. Darker (in dark, lighter) is denser.", element("div", { class: "grid" }, figures));
}

function holdings() {
  const figures = data.splits.map((split, place) => {
    const all = data.groups.filter((group) => group.split === place), those = all.filter((group) => !state.hidden.has(group.name));
    if (!those.length) return null;
    const counts = split.rows.map((row) => { const cells = row.split(",").map(Number); return [...cells, ...Array(split.classes.length - cells.length).fill(0)]; });
    const held = counts.map((row) => row.filter(Boolean).length).sort((a, b) => a - b);
    const more = split.count > counts.length ? `The first ${whole(counts.length)} of ${whole(split.count)} clients.` : `${plural(split.count, "client")}.`;
    const caption = element("span", { class: "named" }, those.map((group) => key(group.order)), element("span", {}, those.map((group) => group.name).join(", ")));
    const tell = (client, label, count) => [element("b", {}, `client ${client}`), element("div", {}, `${split.classes[label]}: ${plural(count, "sample")}`)];
    return denseMap(`split-${place}`, caption, counts, { label: `Samples by client and class: ${more} Half of the clients hold at most ${plural(held[Math.floor((held.length - 1) / 2)], "class")}.`, xLabel: "class", yLabel: "client", tell }, `${more} A client holds ${held[0] === held.at(-1) ? plural(held[0], "class") : `${held[0]} to ${plural(held.at(-1), "class")}`}.`);
  });
  const without = data.groups.filter((group) => group.split === null && !state.hidden.has(group.name)).map((group) => group.name);
  const note = without.length ? `Not known of ${without.join(", ")}: older than this figure.` : null;
  return section("holdings", "Who holds which classes", `Training samples by client and class; of several seeds, the first. ${note ?? ""}`, element("div", { class: "grid" }, figures));
}

function fairness() {
  const told = shown().filter((group) => group.clients);
  if (!told.length) return section("clients", "How clients fare", "Runs with evaluate.clients: true and at their end tell the accuracy of each client; none of those shown does.");
  const bins = told[0].clients.histogram.length;
  const figures = told.map((group) => {
    const { histogram, count, mean, worst_tenth, deviation } = group.clients;
    const found = histogram.map((value, k) => ({ label: `${Math.round((100 * k) / bins)}% to ${Math.round((100 * (k + 1)) / bins)}%`, values: [value], text: plural(value, "client") }));
    const summary = `Mean ${percent(mean[0])}, worst tenth ${percent(worst_tenth[0])}, standard deviation ${percent(deviation[0])}.`;
    return columns(`clients-${group.order}`, named(group), found, {
      label: `Accuracy of ${whole(count)} clients of ${group.name}. ${summary}`, xLabel: null, yFormat: (value) => (Number.isInteger(value) ? whole(value) : ""), orders: [group.order], height: 150, names: false,
      tick: (k) => ((100 * k) / bins) % 25 === 0 ? `${(100 * k) / bins}%` : null,
    }, summary);
  });
  return section("clients", "How clients fare", "How many clients the final model serves how well: the accuracy of each on its own held-out samples or, without any, by its share of classes.", element("div", { class: "grid small" }, figures));
}

// ------------------------------------------------------------------------------------- settings and commands

function folding(id, summary, ...content) {
  return element("details", { open: state.open.has(id), ontoggle: (event) => { event.target.open ? state.open.add(id) : state.open.delete(id); } }, element("summary", { "data-key": `open ${id}` }, summary), content);
}

function settings() {
  const table = (names, rows) => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of settings" },
    element("table", { class: "dense" }, element("thead", {}, element("tr", {}, names.map((name, k) => element("th", { scope: "col", class: k ? "text" : null }, name)))),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map((text, k) => element("td", { class: k ? "text wrap" : null }, text)))))));
  const differing = data.differing.length
    ? table(["setting", ...data.groups.map((group) => group.name)], data.differing.map((name) => [name, ...data.groups.map((group) => group.settings[name])]))
    : element("p", { class: "note" }, "The runs differ in nothing but the seed.");
  const common = Object.entries(data.common);
  return section("settings", "Settings", "What differs between the runs, the seed aside.", differing,
    folding("common", `${whole(common.length)} settings that all have in common`, table(["setting", "value"], common)));
}

function commands() {
  const one = (group) => folding(`yaml ${group.name}`, group.name,
    element("pre", { tabindex: 0 }, group.runs.map((run) => run.command).join("\n")),
    element("p", { class: "note" }, "with ", element("a", { download: group.runs[0].command.split(" ")[2].replace(/^'|'$/g, ""), href: `data:text/yaml;charset=utf-8,${encodeURIComponent(group.yaml)}` }, "this file"), ":"),
    element("pre", { tabindex: 0 }, group.yaml));
  return section("commands", "To repeat the runs", "The same command on the same machine gives the same model, bit for bit. Where data.path or a backbone's file is named, it is where they lay when the run was made.", data.groups.map(one));
}

// ------------------------------------------------------------------------------- served while runs go on

async function poll() {
  try {
    const text = await (await fetch("data.json", { cache: "no-store" })).text();
    if (text !== poll.last && !document.querySelector(".tip:not([hidden])")) { // not under a reader's pointer
      poll.last = text;
      data = JSON.parse(text);
      render();
    }
    document.getElementById("live")?.replaceChildren("Drawn anew as the runs go on.");
  } catch {
    document.getElementById("live")?.replaceChildren("No longer served; this is how the runs stood.");
  }
  setTimeout(poll, data.live);
}

render();
if (data.live && location.protocol.startsWith("http")) setTimeout(poll, data.live);
