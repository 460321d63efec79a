// What all pages are made of: elements, scales, figures. Whatever comes from data becomes text
// nodes and attributes, never markup. A chart is a figure with a function `paint`, called when it is on the page and on
// resizing.

const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "circle", "text"]);
const COLOURS = 8; // --c0 … --c7 in the style
const MARKERS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", // circle
  "M-3.5,-3.5h7v7h-7z", // square
  "M0,-4.6l4.3,7.6h-8.6z", // triangle
  "M0,-5l4,5l-4,5l-4,-5z", // diamond
];

function element(tag, attributes = {}, ...children) {
  const made = SVG_TAGS.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// ------------------------------------------------------------------------------------------------------ scales

/** Round numbers within [low, high], about `count` of them; `least` apart, which is 1 for what is counted. */
function ticks(low, high, count, least = 0) {
  const rough = Math.max(least, (high - low) / Math.max(1, count)),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++)
    found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Round numbers for a logarithmic axis; where it is so short that there are hardly any, evenly spaced ones. */
function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low),
    factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors)
      if (factor * 10 ** power >= low && factor * 10 ** power <= high)
        found.push(Number((factor * 10 ** power).toPrecision(12)));
  return found.length > 1 ? found : ticks(low, high, 4);
}

function scale(low, high, start, stop, isLog = false) {
  const bend = isLog ? Math.log : (value) => value;
  const back = isLog ? Math.exp : (value) => value;
  const a = bend(low),
    b = bend(high) - a || 1;
  const to = (value) => start + ((bend(value) - a) / b) * (stop - start);
  to.isLog = isLog;
  to.invert = (place) => back(a + ((place - start) / (stop - start)) * b);
  return to;
}

// ------------------------------------------------------------------------------------------- styles of groups

const colour = (order) => `var(--c${order % COLOURS})`;
const dashes = (order) => (order < COLOURS ? null : "6 4");
const marker = (order, x, y, size = 1) =>
  element("path", {
    class: "marker",
    d: MARKERS[order % MARKERS.length],
    fill: colour(order),
    transform: `translate(${x} ${y}) scale(${size})`,
  });

/** A short piece of the group's line with its marker: groups are told apart by shape, too. */
const key = (order) =>
  element(
    "svg",
    { class: "key", width: 26, height: 12, "aria-hidden": "true" },
    element("line", {
      x1: 1,
      x2: 25,
      y1: 6,
      y2: 6,
      stroke: colour(order),
      "stroke-width": 2,
      "stroke-dasharray": dashes(order),
    }),
    marker(order, 13, 6),
  );

// ------------------------------------------------------------------------------------------------------ charts

/** A figure with a caption and room for a drawing; `paint(plot, width)` fills it. */
function chart(id, caption, paint, note = null) {
  const plot = element("div", { class: "plot" });
  const figure = element(
    "figure",
    { "data-chart": id },
    caption && element("figcaption", {}, caption),
    plot,
    note && element("p", {}, note),
  );
  figure.paint = () => {
    const width = Math.floor(plot.clientWidth);
    if (width && width !== figure.painted) {
      figure.painted = width;
      plot.replaceChildren();
      paint(plot, width);
    }
  };
  return figure;
}

/** A box that tells values beside the pointer: `show(x, y, children)`, `hide()`; a finger that is lifted leaves it. */
function tipIn(plot, hidden = () => {}) {
  const box = element("div", { class: "tip", role: "status", hidden: true });
  plot.append(box);
  const hide = () => {
    box.hidden = true;
    hidden();
  };
  return {
    hide,
    leave: (event) => event.pointerType === "mouse" && hide(),
    show: (x, y, children) => {
      if (hideTip !== hide) hideTip();
      hideTip = hide;
      box.replaceChildren(...children);
      box.hidden = false;
      const space = plot.clientWidth - box.offsetWidth;
      const beside = x + 14 <= space ? x + 14 : x - box.offsetWidth - 14;
      box.style.left = `${Math.max(0, Math.min(space, beside))}px`;
      box.style.top = `${Math.max(0, y - box.offsetHeight - 10)}px`;
    },
  };
}

/** Listeners of a thing that tells its values when it is pointed at or tapped. */
const telling = (tip, tell) => ({ onpointerenter: tell, onpointerdown: tell, onpointerleave: tip.leave });

/** The tip that was shown last ends when anything is tapped, before that tells its own values, or scrolled. */
let hideTip = () => {};
for (const kind of ["pointerdown", "pointercancel"]) addEventListener(kind, () => hideTip(), { capture: true });

// ------------------------------------------------------------------------------------------------- the page

/** Light and dark by a button; what the reader chose is remembered where the browser allows it. */
function themeButton() {
  const kept = () => {
    try {
      return localStorage.getItem("fedsieve-theme");
    } catch {
      return null;
    }
  };
  const isDark = () =>
    (document.documentElement.dataset.theme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = element("button", { class: "theme", type: "button", "data-key": "theme" });
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Show the page ${isDark() ? "light" : "dark"}`);
  };
  if (kept()) document.documentElement.dataset.theme = kept();
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("fedsieve-theme", document.documentElement.dataset.theme);
    } catch {
      /* not remembered, then */
    }
    name();
  });
  name();
  return button;
}

function section(id, title, note, ...content) {
  return element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title` }, title),
    note && element("p", { class: "note" }, note),
    content,
  );
}

/** Put content on the page and paint its charts, keeping the focus and the places where the reader is. */
function fill(content) {
  const page = document.getElementById("page"),
    focused = document.activeElement?.dataset?.key,
    place = scrollY;
  const boxes = () => [...page.querySelectorAll(".legend, .scroll")],
    nameOf = (box) => box.getAttribute("aria-label") ?? box.closest("[data-chart]").dataset.chart;
  const places = new Map(boxes().map((box) => [nameOf(box), [box.scrollLeft, box.scrollTop]]));
  page.replaceChildren(...content.flat(Infinity).filter(Boolean));
  paintAll();
  scrollTo(0, place);
  for (const box of boxes()) [box.scrollLeft, box.scrollTop] = places.get(nameOf(box)) ?? [0, 0];
  if (focused) page.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

const paintAll = () => document.querySelectorAll("figure[data-chart]").forEach((figure) => figure.paint());
addEventListener("resize", paintAll);
