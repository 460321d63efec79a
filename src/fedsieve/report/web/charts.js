"use strict";
// Drawing: elements, numbers for people, and the kinds of charts. Whatever comes from data becomes text nodes and
// attributes, never markup. A chart is a figure with a function `paint`, called once it is on the page and on resizing.

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
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// ------------------------------------------------------------------------------------------ numbers for people

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);
const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};
const whole = (value) => value.toLocaleString("en-US");

function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return unit === "B" ? `${Math.round(count)} B` : `${Number(count.toPrecision(3))} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Number(seconds.toPrecision(seconds < 1 ? 2 : 3))} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  return minutes < 60 ? `${minutes} min ${rest} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : /(s|x)$/.test(noun) ? "es" : "s"}`;

// ------------------------------------------------------------------------------------------------------ scales

/** Round numbers within [low, high], about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low), factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(factor * 10 ** power);
  return found;
}

function scale(low, high, start, stop, isLog = false) {
  const bend = isLog ? Math.log : (value) => value;
  const back = isLog ? Math.exp : (value) => value;
  const a = bend(low), b = bend(high) - a || 1;
  const to = (value) => start + ((bend(value) - a) / b) * (stop - start);
  to.invert = (place) => back(a + ((place - start) / (stop - start)) * b);
  return to;
}

// ------------------------------------------------------------------------------------------- styles of groups

const colour = (order) => `var(--c${order % COLOURS})`;
const dashes = (order) => (order < COLOURS ? null : "6 4");
const marker = (order, x, y, size = 1) =>
  element("path", { class: "marker", d: MARKERS[order % MARKERS.length], fill: colour(order), transform: `translate(${x} ${y}) scale(${size})` });

/** A short piece of the group's line with its marker: groups are told apart by shape, too. */
const key = (order) =>
  element("svg", { class: "key", width: 26, height: 12, "aria-hidden": "true" },
    element("line", { x1: 1, x2: 25, y1: 6, y2: 6, stroke: colour(order), "stroke-width": 2, "stroke-dasharray": dashes(order) }),
    marker(order, 13, 6));

// ------------------------------------------------------------------------------------------------------ charts

/** A figure with a caption and room for a drawing; `paint(plot, width)` fills it. */
function chart(id, caption, paint, note = null) {
  const plot = element("div", { class: "plot" });
  const figure = element("figure", { "data-chart": id }, caption && element("figcaption", {}, caption), plot, note && element("p", {}, note));
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

/** A box that tells values beside the pointer: `show(x, y, children)`, `hide()`. */
function tipIn(plot) {
  const box = element("div", { class: "tip", role: "status", hidden: true });
  plot.append(box);
  return {
    hide: () => { box.hidden = true; },
    show: (x, y, children) => {
      box.replaceChildren(...children);
      box.hidden = false;
      const space = plot.clientWidth - box.offsetWidth;
      const beside = x + 14 <= space ? x + 14 : x - box.offsetWidth - 14;
      box.style.left = `${Math.max(0, Math.min(space, beside))}px`;
      box.style.top = `${Math.max(0, y - box.offsetHeight - 10)}px`;
    },
  };
}

/**
 * Lines with bands. `series`: {name, order, x, y, margin?, n?}; `options`: {label, xLabel, xFormat, yFormat, marks: [[name,
 * x]], isLog, floor, ceiling, at: value -> text of the tip's head, range: [low, high] or null, zoom: range -> void}.
 */
function lines(id, caption, series, options, note = null) {
  return chart(id, caption, (plot, width) => {
    const height = 264, left = 50, right = 12, top = 20, bottom = 38;
    const [low, high] = options.range ?? limits(series.flatMap((one) => one.x), options.isLog ? "log" : "x");
    let [bottomY, topY] = heights(series, low, high);
    if (options.floor !== undefined) bottomY = Math.max(options.floor, bottomY);
    if (options.ceiling !== undefined) topY = Math.min(options.ceiling, topY);
    const x = scale(low, high, left, width - right, options.isLog), y = scale(bottomY, topY, height - bottom, top);
    const label = `${options.label}. ${series.map((one) => `${one.name}: ${options.yFormat(one.y.at(-1))} at the end`).join("; ")}.`;
    const svg = element("svg", { width, height, role: "img", tabindex: 0, "aria-label": `${label} Arrow keys tell values.` });
    axes(svg, { x, y, width, height, left, right, top, bottom, low, high, bottomY, topY }, options);
    const clip = `clip-${id}`;
    svg.append(clipped(clip, left, top - 6, width - left - right + 6, height - top - bottom + 12));
    const drawn = element("g", { "clip-path": `url(#${clip})` });
    for (const one of series) drawn.append(curve(one, x, y));
    svg.append(drawn);
    plot.append(svg);
    followPointer(plot, svg, series, x, y, options, { top, bottom: height - bottom, left, right: width - right });
  }, note);
}

/** What is seen of y: all means, and bands as far as they leave the means readable (those of two seeds are very wide). */
function heights(series, low, high) {
  const points = series.flatMap((one) => one.x.map((x, k) => [x, one.y[k], one.margin?.[k] ?? 0])).filter(([x]) => x >= low && x <= high);
  const means = points.map(([, y]) => y), room = 0.3 * (Math.max(...means) - Math.min(...means)) || Infinity;
  const [bottom, top] = [Math.min(...means) - room, Math.max(...means) + room];
  return limits(points.flatMap(([, y, margin]) => [Math.max(bottom, y - margin), Math.min(top, y + margin)]), "y");
}

function limits(values, kind) {
  const low = Math.min(...values), high = Math.max(...values);
  if (kind === "log") return [low / 1.1, high * 1.1];
  if (low === high) return kind === "x" ? [low - 0.5, high + 0.5] : [low - Math.abs(low) * 0.1 - 0.01, high + Math.abs(high) * 0.1 + 0.01];
  return kind === "x" ? [low, high] : [low - 0.05 * (high - low), high + 0.05 * (high - low)];
}

function clipped(id, x, y, width, height) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "clipPath");
  shape.id = id;
  shape.append(element("rect", { x, y, width, height }));
  return shape;
}

function axes(svg, { x, y, width, height, left, right, top, bottom, low, high, bottomY, topY }, options) {
  for (const value of ticks(bottomY, topY, 5)) {
    svg.append(element("line", { class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, options.yTick ? options.yTick(value) : options.yFormat(value)));
  }
  const base = height - bottom, count = Math.max(2, Math.floor((width - left) / 80));
  for (const value of options.isLog ? logTicks(low, high) : ticks(low, high, count)) {
    svg.append(element("line", { class: "axis", x1: x(value), x2: x(value), y1: base, y2: base + 4 }));
    svg.append(element("text", { x: x(value), y: base + 17, "text-anchor": "middle" }, options.xFormat(value)));
  }
  svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: base, y2: base }));
  svg.append(element("text", { x: width - right, y: height - 4, "text-anchor": "end" }, options.xLabel));
  for (const [name, start] of options.marks ?? []) {
    const at = Math.max(left, x(Math.max(low, start - 0.5)));
    if (start > high || at > width - right - 10) continue;
    if (start > low) svg.append(element("line", { class: "phase", x1: at, x2: at, y1: top - 6, y2: base }));
    svg.append(element("text", { class: "phase-name", x: at + 4, y: top - 8 }, name));
  }
}

function curve(one, x, y) {
  const group = element("g", { class: "series", "data-series": one.name });
  const points = one.x.map((value, k) => [x(value), y(one.y[k])]);
  if (one.margin) {
    const up = one.x.map((value, k) => `${x(value)},${y(one.y[k] + (one.margin[k] ?? 0))}`);
    const down = one.x.map((value, k) => `${x(value)},${y(one.y[k] - (one.margin[k] ?? 0))}`).reverse();
    group.append(element("path", { class: "band", d: `M${up.join("L")}L${down.join("L")}Z`, fill: colour(one.order), opacity: 0.13 }));
  }
  group.append(element("path", { class: "curve", d: `M${points.map((point) => point.join(",")).join("L")}`, fill: "none", stroke: colour(one.order), "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": dashes(one.order) }));
  const each = Math.max(1, Math.ceil(points.length / 14)); // markers tell lines apart without covering them
  points.forEach(([px, py], k) => {
    if (k % each === 0 || k === points.length - 1) group.append(marker(one.order, px, py, points.length > 30 ? 0.85 : 1));
  });
  return group;
}

/** Values beside the pointer, on hovering, tapping or with arrow keys; a stretch that is dragged over is zoomed into. */
function followPointer(plot, svg, series, x, y, options, box) {
  const tip = tipIn(plot), cross = element("g", {});
  svg.append(cross);
  const stops = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  let place = -1, dragged = null;
  const tell = (value) => {
    const found = series.map((one) => [one, one.x.indexOf(value)]).filter(([, k]) => k >= 0);
    cross.replaceChildren(element("line", { class: "cross", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }));
    for (const [one, k] of found) cross.append(marker(one.order, x(value), y(one.y[k]), 1.3));
    const rows = found.map(([one, k]) => element("div", { "data-series": one.name }, key(one.order), element("span", { style: "flex:1" }, one.name), element("span", {}, valueText(one, k, options))));
    const [one, k] = found[0];
    tip.show(x(value), Math.min(...found.map(([s, i]) => y(s.y[i]))), [element("b", {}, options.at(value, one, k)), ...rows]);
  };
  const hide = () => { tip.hide(); cross.replaceChildren(); place = -1; };
  const within = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointermove", (event) => {
    const at = within(event);
    if (dragged !== null && Math.abs(at - dragged) > 6) {
      tip.hide();
      const [a, b] = [Math.min(at, dragged), Math.max(at, dragged)].map((k) => Math.min(box.right, Math.max(box.left, k)));
      cross.replaceChildren(element("rect", { class: "chosen", x: a, y: box.top, width: b - a, height: box.bottom - box.top }));
      return;
    }
    place = stops.reduce((best, value, k) => (Math.abs(x(value) - at) < Math.abs(x(stops[best]) - at) ? k : best), 0);
    tell(stops[place]);
  });
  svg.addEventListener("pointerleave", () => { dragged = null; hide(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("pointerdown", (event) => { if (options.zoom && event.pointerType === "mouse") dragged = within(event); });
  svg.addEventListener("pointerup", (event) => {
    const from = dragged, to = within(event);
    dragged = null;
    if (from !== null && Math.abs(to - from) > 6) {
      const range = [Math.min(from, to), Math.max(from, to)].map((k) => x.invert(Math.min(box.right, Math.max(box.left, k))));
      if (stops.some((stop) => stop >= range[0] && stop <= range[1])) options.zoom(range);
    }
  });
  svg.addEventListener("dblclick", () => options.zoom?.(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") { hide(); options.zoom?.(null); }
    if (!step) return;
    event.preventDefault();
    place = Math.min(stops.length - 1, Math.max(0, place < 0 ? (step > 0 ? 0 : stops.length - 1) : place + step));
    tell(stops[place]);
  });
}

function valueText(one, k, options) {
  const margin = one.margin?.[k];
  return options.yFormat(one.y[k]) + (margin === null || margin === undefined ? "" : ` ± ${options.yFormat(margin)}`);
}

/** Horizontal bars, each of parts: `rows`: {name, order, parts: [[name, value]]}. */
function bars(id, caption, rows, format, note = null) {
  return chart(id, caption, (plot, width) => {
    const each = 46, most = Math.max(...rows.map((row) => row.parts.reduce((sum, [, value]) => sum + value, 0))) || 1;
    const x = scale(0, most, 0, width);
    const told = rows.map((row) => `${row.name}: ${row.parts.map(([name, value]) => `${name} ${format(value)}`).join(", ")}`);
    const svg = element("svg", { width, height: rows.length * each + 4, role: "img", "aria-label": told.join("; ") });
    plot.append(svg);
    const tip = tipIn(plot);
    rows.forEach((row, k) => {
      const top = k * each, total = row.parts.reduce((sum, [, value]) => sum + value, 0);
      svg.append(element("text", { class: "strong", x: 0, y: top + 15 }, shortened(row.name, width - 90)));
      svg.append(element("text", { x: width, y: top + 15, "text-anchor": "end" }, format(total)));
      const group = element("g", { class: "series", "data-series": row.name });
      let start = 0;
      row.parts.forEach(([name, value], part) => {
        const at = start;
        const tell = () => tip.show(x(at + value / 2), top + 12, [element("b", {}, name), element("div", {}, format(value))]);
        group.append(element("rect", { class: "bar", x: x(at), y: top + 22, width: Math.max(1, x(value) - 1.5), height: 14, rx: 2, fill: colour(row.order), opacity: 1 / (1 + part * 0.8), onpointerenter: tell, onpointerleave: tip.hide }));
        start += value;
      });
      svg.append(group);
    });
  }, note);
}

const shortened = (text, room) => (text.length * 7 <= room ? text : `${text.slice(0, Math.max(4, Math.floor(room / 7) - 1))}…`);

/** Upright bars: `columns`: {label, values: [number], text}, one colour for each place among the values. */
function columns(id, caption, found, { label, xLabel, yFormat, orders, height = 190, names = true, tick = null }, note = null) {
  return chart(id, caption, (plot, width) => {
    const left = 44, bottom = names ? 34 : 24, top = 10, count = found.length;
    const each = Math.max(7, (width - left) / count), full = left + each * count;
    const most = Math.max(...found.flatMap((one) => one.values)) || 1;
    const y = scale(0, most, height - bottom, top);
    const svg = element("svg", { width: full, height, role: "img", "aria-label": label });
    for (const value of ticks(0, most, 4)) {
      svg.append(element("line", { class: "gridline", x1: left, x2: full, y1: y(value), y2: y(value) }));
      svg.append(element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, yFormat(value)));
    }
    const longest = Math.max(...found.map((one) => one.label.length)), every = Math.ceil((longest * 7 + 8) / each);
    const box = element("div", { class: "scroll" }, svg);
    plot.append(box);
    const tip = tipIn(plot);
    found.forEach((one, k) => {
      const taken = Math.min(72, each - (each > 12 ? 4 : 1)), inner = taken / one.values.length, gap = (each - taken) / 2;
      const group = element("g", { class: "column", onpointerenter: () => tip.show(left + (k + 0.5) * each - box.scrollLeft, y(Math.max(...one.values)), [element("b", {}, one.label), element("div", {}, one.text)]), onpointerleave: tip.hide });
      group.append(element("rect", { x: left + k * each, y: top, width: each, height: height - bottom - top, fill: "transparent" }));
      one.values.forEach((value, place) => group.append(element("rect", { class: "bar", x: left + k * each + gap + place * inner, y: y(value), width: Math.max(1, inner - 0.5), height: height - bottom - y(value), fill: colour(orders[place]) })));
      svg.append(group);
      const shown = tick ? tick(k) : names && k % every === 0 ? one.label : null;
      if (shown !== null) svg.append(element("text", { x: left + (tick ? k : k + 0.5) * each, y: height - bottom + 15, "text-anchor": "middle" }, shown));
    });
    if (tick) svg.append(element("text", { x: full, y: height - bottom + 15, "text-anchor": "end" }, tick(count)));
    svg.append(element("line", { class: "axis", x1: left, x2: full, y1: height - bottom, y2: height - bottom }));
    if (xLabel) svg.append(element("text", { x: full, y: height - 2, "text-anchor": "end" }, xLabel));
  }, note);
}

const heat = (share) => `color-mix(in oklab, var(--heat-high) ${(100 * Math.min(1, share)).toFixed(1)}%, var(--heat-low))`;

/** A heat map with its numbers: `rows`: {label, cells: [number or null]}, of which `most` is the darkest. */
function numberedMap(id, caption, rows, names, most, { label, rowLabel, format }, note = null) {
  return chart(id, caption, (plot, width) => {
    const left = 52, top = 22, each = Math.max(34, Math.min(64, (width - left) / names.length)), tall = 24;
    const svg = element("svg", { width: left + each * names.length, height: top + tall * rows.length + 4, role: "img", "aria-label": label });
    svg.append(element("text", { x: 0, y: 14 }, rowLabel));
    names.forEach((name, k) => svg.append(element("text", { x: left + (k + 0.5) * each, y: 14, "text-anchor": "middle" }, name)));
    const box = element("div", { class: "scroll" }, svg);
    plot.append(box);
    const tip = tipIn(plot);
    rows.forEach((row, k) => {
      svg.append(element("text", { x: left - 10, y: top + k * tall + 16, "text-anchor": "end" }, row.label));
      row.cells.forEach((value, place) => {
        const x = left + place * each, y = top + k * tall, share = value === null ? 0 : value / (most || 1);
        const tell = () => tip.show(x + each / 2 - box.scrollLeft, y, [element("b", {}, `${rowLabel} ${row.label}, ${names[place]}`), element("div", {}, value === null ? "no mask here" : percent(value))]);
        svg.append(element("rect", { class: value === null ? "cell none" : "cell", x, y, width: each, height: tall, style: value === null ? null : `fill:${heat(share)}`, onpointerenter: tell, onpointerleave: tip.hide }));
        svg.append(element("text", { class: share > 0.67 ? "on-high" : share > 0.47 ? "on-middle" : "on-low", x: x + each / 2, y: y + 16, "text-anchor": "middle", style: "pointer-events:none" }, value === null ? "–" : format(value)));
      });
    });
  }, note);
}

/** A heat map of many cells, drawn as one path for each of a few shades: sharp in print, and quick for 20,000 cells. */
function denseMap(id, caption, counts, { label, xLabel, yLabel, tell }, note = null) {
  const shades = 12, most = Math.max(1, ...counts.flat()), wide = Math.max(1, ...counts.map((row) => row.length));
  const drawing = (plot, width) => {
    const left = 40, top = 4, bottom = 34;
    const each = Math.max(4, Math.min(64, (width - left - 2) / wide)), tall = Math.max(3, Math.min(18, 380 / counts.length));
    const height = top + tall * counts.length + bottom;
    const svg = element("svg", { width: left + each * wide + 2, height, role: "img", "aria-label": label });
    svg.append(element("rect", { class: "none", x: left, y: top, width: each * wide, height: tall * counts.length }));
    const paths = Array.from({ length: shades + 1 }, () => []);
    counts.forEach((row, k) => row.forEach((count, place) => {
      if (count) paths[Math.max(1, Math.round((shades * count) / most))].push(`M${(left + place * each).toFixed(2)},${(top + k * tall).toFixed(2)}h${each.toFixed(2)}v${tall.toFixed(2)}h-${each.toFixed(2)}z`);
    }));
    paths.forEach((cells, shade) => cells.length && svg.append(element("path", { class: "cells", d: cells.join(""), style: `fill:${heat(0.12 + (0.88 * shade) / shades)}` })));
    for (const value of ticks(0, counts.length - 1, 5).filter(Number.isInteger)) svg.append(element("text", { x: left - 6, y: top + (value + 0.5) * tall + 4, "text-anchor": "end" }, whole(value)));
    for (const value of ticks(0, wide - 1, Math.min(10, (each * wide) / 40)).filter(Number.isInteger)) svg.append(element("text", { x: left + (value + 0.5) * each, y: height - bottom + 15, "text-anchor": "middle" }, whole(value)));
    svg.append(element("text", { x: left + each * wide, y: height - 4, "text-anchor": "end" }, xLabel), element("text", { x: 0, y: height - 4 }, yLabel));
    const box = element("div", { class: "scroll" }, svg);
    plot.append(box);
    const tip = tipIn(plot);
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
      const row = Math.floor((y - top) / tall), column = Math.floor((x - left) / each);
      if (row < 0 || row >= counts.length || column < 0 || column >= wide) return tip.hide();
      tip.show(x - box.scrollLeft, top + row * tall, tell(row, column, counts[row][column] ?? 0));
    });
    svg.addEventListener("pointerleave", tip.hide);
    plot.append(element("div", { class: "scale", "aria-hidden": "true" }, "0", element("i"), `${whole(most)} samples`));
  };
  return chart(id, caption, drawing, note);
}

// ------------------------------------------------------------------------------------------------- the page

/** Light and dark by a button; what the reader chose is remembered where the browser allows it. */
function themeButton() {
  const kept = () => { try { return localStorage.getItem("fedsieve-theme"); } catch { return null; } };
  const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = element("button", { class: "theme", type: "button", "data-key": "theme" });
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Show the page ${isDark() ? "light" : "dark"}`); };
  if (kept()) document.documentElement.dataset.theme = kept();
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("fedsieve-theme", document.documentElement.dataset.theme); } catch { /* not remembered, then */ }
    name();
  });
  name();
  return button;
}

/** Put content on the page and paint its charts, keeping the focus and the place where the reader is. */
function fill(content) {
  const page = document.getElementById("page"), focused = document.activeElement?.dataset?.key, place = scrollY;
  page.replaceChildren(...content.flat(Infinity).filter(Boolean));
  paintAll();
  scrollTo(0, place);
  if (focused) page.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

const paintAll = () => document.querySelectorAll("figure[data-chart]").forEach((figure) => figure.paint());
addEventListener("resize", paintAll);
