// The page about runs. `state` is what the reader did; everything else follows from it and the data, so that a page
// that is served while runs go on can be drawn anew with new data and looks as it was left.

const state = {
  hidden: new Set(),
  open: new Set(),
  choice: { accuracy: "val_accuracy", loss: "val_loss" },
  range: null,
};
const NAMES = {
  val_accuracy: "validation",
  test_accuracy: "test",
  val_loss: "validation",
  test_loss: "test",
  train_loss: "training",
};
const LAYERS = ["q", "k", "v", "proj", "fc1", "fc2", "norms", "all"];
let data = JSON.parse(document.getElementById("data").textContent);

function render() {
  data.groups.forEach((group, order) => {
    group.order = order;
  });
  fill([header(), warnings(), data.groups.length ? report() : waiting(), footer()]);
}

function report() {
  return [legend(), headline(), gains(), learning(), drift(), cost(), density(), holdings(), fairness(), settings(), commands()];
}

const shown = () => data.groups.filter((group) => !state.hidden.has(group.name));
const named = (group, text = group.name) =>
  element("span", { class: "named" }, key(group.order), element("span", {}, breakable(text)));

/** A long name may be broken behind `/`, `_` and `-`, as in the tables of the terminal. */
const breakable = (text) => text.split(/(?<=[/_-])/).flatMap((part) => [part, element("wbr")]);

function header() {
  const runs = data.groups.reduce((sum, group) => sum + group.seeds.length, 0);
  const unlike = (field) => [...new Set(data.groups.map((group) => group[field]))].join(", ");
  const about = runs
    ? `${plural(runs, "run")} in ${plural(data.groups.length, "group")}; ${unlike("data")}; ${unlike("backbone")}`
    : null;
  const live = location.protocol.startsWith("http") && data.live;
  return element(
    "header",
    {},
    element(
      "div",
      {},
      element("h1", {}, data.title),
      about && element("p", { class: "about" }, about),
      live && element("p", { class: "about live", id: "live" }, "Drawn anew as the runs go on."),
    ),
    themeButton(),
  );
}

const warnings = () =>
  data.warnings.length > 0 &&
  element(
    "div",
    { class: "warnings", role: "note" },
    data.warnings.map((text) => element("p", {}, `Warning: ${text}`)),
  );
const waiting = () =>
  element("p", { class: "about", id: "waiting" }, "Waiting for a run: none has been written here yet.");
const footer = () =>
  element(
    "footer",
    {},
    `Made by fedsieve ${data.version}. ± and bands are 95% intervals of the mean over seeds (Student's t); `,
    "a single seed has none.",
  );

// ----------------------------------------------------------------------------------------- which runs are shown

function legend() {
  const toggle = (name) => {
    state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name);
    render();
  };
  return element(
    "div",
    { class: "legend", role: "group", "aria-label": "Runs to show" },
    data.groups.map((group) =>
      element(
        "button",
        {
          type: "button",
          "aria-pressed": String(!state.hidden.has(group.name)),
          "data-key": `legend ${group.name}`,
          title: "Show or hide in all charts",
          onclick: () => toggle(group.name),
        },
        key(group.order),
        element("span", {}, group.name),
      ),
    ),
  );
}

// ------------------------------------------------------------------------------------- settings and commands

function folding(id, summary, ...content) {
  return element(
    "details",
    {
      open: state.open.has(id),
      ontoggle: (event) => {
        event.target.open ? state.open.add(id) : state.open.delete(id);
      },
    },
    element("summary", { "data-key": `open ${id}` }, summary),
    content,
  );
}

function settings() {
  const differing = data.differing.length
    ? textTable(
        "Table of settings that differ",
        ["setting", ...data.groups.map((group) => group.name)],
        data.differing.map((name) => [name, ...data.groups.map((group) => group.settings[name])]),
      )
    : element("p", { class: "note" }, "The runs differ in nothing but the seed.");
  const common = Object.entries(data.common);
  return section(
    "settings",
    "Settings",
    "What differs between the runs, the seed aside, and has an effect; – where there is nothing to set.",
    differing,
    folding(
      "common",
      `${whole(common.length)} settings that all have in common, as far as they apply`,
      textTable("Table of settings in common", ["setting", "value"], common),
    ),
  );
}

function commands() {
  const one = (group) =>
    folding(
      `yaml ${group.name}`,
      group.name,
      element("pre", { tabindex: 0 }, group.runs.map((run) => run.command).join("\n")),
      element(
        "p",
        { class: "note" },
        "with ",
        element(
          "a",
          {
            download: group.runs[0].command.split(" ")[2].replace(/^'|'$/g, ""),
            href: `data:text/yaml;charset=utf-8,${encodeURIComponent(group.yaml)}`,
          },
          "this file",
        ),
        ":",
      ),
      element("pre", { tabindex: 0 }, group.yaml),
    );
  return section(
    "commands",
    "To repeat the runs",
    "The same command on the same machine gives the same model, bit for bit. Where data.path or a backbone's file " +
      "is named, it is where they lay when the run was made.",
    data.groups.map(one),
  );
}

// ------------------------------------------------------------------------------- served while runs go on

async function poll() {
  try {
    const text = await (await fetch("data.json", { cache: "no-store" })).text();
    if (text !== poll.last && !document.querySelector(".tip:not([hidden])")) {
      // not under a reader's pointer
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
