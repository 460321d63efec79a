// Curves with bands by round, or by anything else that grows.

const TINY = 1e-12; // instead of what a logarithmic axis cannot show

/**
 * Lines with bands. `series`: {name, order, x, y, margin?, n?, seeds?}; `options`: {label, xLabel, xFormat, yFormat,
 * xLeast?: between ticks, xTick?, yTick?, marks: [[name, x]], isLog, isLogY, floor, ceiling,
 * at: (value, names) -> head of the tip, where?: [[from, to]] -> where curves lie on each other, in words,
 * beside?: (one, k) -> what a row of it says behind the value, range: [low, high] or null, zoom: range -> void}.
 */
function lines(id, caption, series, options, note = null) {
  return chart(
    id,
    caption,
    (plot, width) => {
      const height = 264,
        left = 50,
        right = 12,
        top = 20,
        bottom = 38;
      const stops = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
      const [low, high] = options.range ?? limits(stops, options.isLog ? "log" : "x");
      const seen = stops.filter((x) => x >= low && x <= high);
      if (!seen.length) {
        // the range was chosen on a chart with other rounds, or of a run that is hidden now
        const none = element("text", { x: left, y: height / 2 }, "No value in these rounds.");
        plot.append(element("svg", { width, height, ondblclick: () => options.zoom(null) }, none));
        return;
      }
      const isLogY = options.isLogY && series.every((one) => one.y.every((value) => value > 0));
      let [bottomY, topY] = heights(series, low, high, isLogY);
      if (options.floor !== undefined && !isLogY) bottomY = Math.max(options.floor, bottomY);
      if (options.ceiling !== undefined) topY = Math.min(options.ceiling, topY);
      const x = scale(low, high, left, width - right, options.isLog),
        y = scale(bottomY, topY, height - bottom, top, isLogY);
      const ends = series.map((one) => `${one.name}: ${options.yFormat(one.y.at(-1))} at the end`);
      const label = `${options.label}. ${ends.join("; ")}.`;
      const svg = element("svg", {
        width,
        height,
        role: "img",
        tabindex: 0,
        "aria-label": `${label} Arrow keys tell values.`,
      });
      axes(svg, { x, y, width, height, left, right, top, bottom, low, high, bottomY, topY, isLogY }, options);
      const around = (room, name) =>
        clipped(name, left - room, top - 6, width - left - right + 2 * room, height - top - bottom + 12);
      svg.append(around(0, `clip-${id}`), around(6, `markers-${id}`)); // a marker at the edge is whole
      const drawn = element("g", { "clip-path": `url(#markers-${id})` });
      const steps = sharedSteps(series);
      series.forEach((one, place) => drawn.append(curve(one, place, steps[place], x, y, `url(#clip-${id})`)));
      svg.append(drawn);
      plot.append(svg);
      const box = { top, bottom: height - bottom, left, right: width - right };
      followPointer(plot, svg, series, seen, x, y, options, box);
    },
    [note, aboutOverlaps(series, options.where)].filter(Boolean).join(" "),
  );
}

/** What is seen of y: all means, and bands as far as they leave these readable (those of two seeds are very wide). */
function heights(series, low, high, isLog) {
  const [bend, back] = isLog ? [(value) => Math.log(Math.max(value, TINY)), Math.exp] : [Number, Number];
  const points = series
    .flatMap((one) => one.x.map((x, k) => [x, one.y[k], one.margin?.[k] ?? 0]))
    .filter(([x]) => x >= low && x <= high);
  const means = points.map(([, y]) => bend(y)),
    room = 0.3 * (Math.max(...means) - Math.min(...means)) || (isLog ? 0.5 : Infinity);
  const [bottom, top] = [Math.min(...means) - room, Math.max(...means) + room];
  return limits(
    points.flatMap(([, y, margin]) => [Math.max(bottom, bend(y - margin)), Math.min(top, bend(y + margin))]),
    "y",
  ).map(back);
}

function limits(values, kind) {
  const low = Math.min(...values),
    high = Math.max(...values);
  if (kind === "log") return [low / 1.1, high * 1.1];
  if (low === high)
    return kind === "x"
      ? [low - 0.5, high + 0.5]
      : [low - Math.abs(low) * 0.1 - 0.01, high + Math.abs(high) * 0.1 + 0.01];
  return kind === "x" ? [low, high] : [low - 0.05 * (high - low), high + 0.05 * (high - low)];
}

function clipped(id, x, y, width, height) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "clipPath");
  shape.id = id;
  shape.append(element("rect", { x, y, width, height }));
  return shape;
}

function axes(svg, { x, y, width, height, left, right, top, bottom, low, high, bottomY, topY, isLogY }, options) {
  for (const value of isLogY ? logTicks(bottomY, topY) : ticks(bottomY, topY, 5)) {
    svg.append(element("line", { class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(
      element(
        "text",
        { x: left - 8, y: y(value) + 4, "text-anchor": "end" },
        options.yTick ? options.yTick(value) : options.yFormat(value),
      ),
    );
  }
  const base = height - bottom,
    count = Math.max(2, Math.floor((width - left) / 80));
  let free = -Infinity; // up to where labels are
  for (const value of options.isLog ? logTicks(low, high) : ticks(low, high, count, options.xLeast)) {
    svg.append(element("line", { class: "axis", x1: x(value), x2: x(value), y1: base, y2: base + 4 }));
    const text = (options.xTick ?? options.xFormat)(value),
      half = 3.5 * text.length + 4;
    if (x(value) - half < free) continue;
    free = x(value) + half;
    svg.append(element("text", { x: x(value), y: base + 17, "text-anchor": "middle" }, text));
  }
  svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: base, y2: base }));
  svg.append(element("text", { x: width - right, y: height - 4, "text-anchor": "end" }, options.xLabel));
  const marks = (options.marks ?? [])
    .map(([name, start]) => [name, start - 0.5])
    .sort((one, other) => one[1] - other[1]);
  const current = marks.findLastIndex(([, start]) => start <= low); // those before it are over where the axis begins
  free = -Infinity;
  for (const [name, start] of marks.slice(Math.max(0, current))) {
    const at = x(Math.max(low, start));
    if (at > width - right - 10) continue;
    if (start > low) svg.append(element("line", { class: "phase", x1: at, x2: at, y1: top - 6, y2: base }));
    if (at < free) continue;
    free = at + 7 * name.length + 8;
    svg.append(element("text", { class: "phase-name", x: at + 4, y: top - 8 }, name));
  }
}

/** A curve with its band; `place` is its own among the series, and `steps` those that it shares with others. */
function curve(one, place, steps, x, y, clip) {
  const group = element("g", { class: "series", "data-series": one.name });
  const points = one.x.map((value, k) => [x(value), y(one.y[k])]);
  for (const places of stretches(one.margin ?? [])) {
    const up = places.map((k) => `${x(one.x[k])},${y(one.y[k] + one.margin[k])}`);
    const lowest = y.isLog ? TINY : -Infinity;
    const down = places.map((k) => `${x(one.x[k])},${y(Math.max(lowest, one.y[k] - one.margin[k]))}`).reverse();
    group.append(
      element("path", {
        class: "band",
        "clip-path": clip,
        d: `M${up.join("L")}L${down.join("L")}Z`,
        fill: colour(one.order),
        opacity: 0.13,
      }),
    );
  }
  for (const piece of points.length > 1 ? pieces(place, steps) : [{ from: 0, to: 0 }])
    group.append(
      element("path", {
        class: "curve",
        "clip-path": clip,
        d: `M${points.slice(piece.from, piece.to + 1).map((point) => point.join(",")).join("L")}`,
        fill: "none",
        stroke: colour(one.order),
        "stroke-width": 2,
        "stroke-linejoin": "round",
        ...(piece.dashes ?? { "stroke-dasharray": dashes(one.order) }),
      }),
    );
  const each = Math.max(1, Math.ceil(points.length / 14)); // markers tell lines apart without covering them
  points.forEach(([px, py], k) => {
    const isLast = k === points.length - 1,
      nth = isLast ? Math.ceil(k / each) : k / each;
    if ((isLast || k % each === 0) && hasMarker(place, steps[Math.min(k, steps.length - 1)], nth))
      group.append(marker(one.order, px, py, points.length > 30 ? 0.85 : 1));
  });
  return group;
}

/** The places of values that are known, those that follow each other together. */
function stretches(values) {
  const found = [];
  values.forEach((value, k) => {
    if (value === null) return;
    if (found.at(-1)?.at(-1) === k - 1) found.at(-1).push(k);
    else found.push([k]);
  });
  return found;
}

/** Values beside the pointer, on hovering, tapping or with arrow keys; what is dragged over is zoomed into. */
function followPointer(plot, svg, series, stops, x, y, options, box) {
  const cross = element("g", {});
  svg.append(cross);
  let place = -1,
    dragged = null;
  const tip = tipIn(plot, () => {
    cross.replaceChildren();
    place = -1;
  });
  const tell = (value) => {
    const found = series.map((one) => [one, one.x.indexOf(value)]).filter(([, k]) => k >= 0);
    cross.replaceChildren(element("line", { class: "cross", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }));
    for (const [one, k] of found) cross.append(marker(one.order, x(value), y(one.y[k]), 1.3));
    const rows = found.map(([one, k]) =>
      element(
        "div",
        { "data-series": one.name },
        key(one.order),
        element("span", { style: "flex:1" }, one.name),
        element("span", {}, valueText(one, k, options)),
      ),
    );
    const head = options.at(
      value,
      found.map(([one]) => one.name),
    );
    tip.show(x(value), Math.min(...found.map(([one, k]) => y(one.y[k]))), [element("b", {}, head), ...rows]);
  };
  const tellNearest = (at) => {
    place = stops.reduce((best, value, k) => (Math.abs(x(value) - at) < Math.abs(x(stops[best]) - at) ? k : best), 0);
    tell(stops[place]);
  };
  const within = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointermove", (event) => {
    const at = within(event);
    if (dragged !== null && Math.abs(at - dragged) > 6) {
      tip.hide();
      const [a, b] = [Math.min(at, dragged), Math.max(at, dragged)].map((k) =>
        Math.min(box.right, Math.max(box.left, k)),
      );
      cross.replaceChildren(
        element("rect", { class: "chosen", x: a, y: box.top, width: b - a, height: box.bottom - box.top }),
      );
      return;
    }
    tellNearest(at);
  });
  svg.addEventListener("pointerleave", (event) => {
    dragged = null;
    tip.leave(event);
  });
  svg.addEventListener("blur", tip.hide);
  svg.addEventListener("pointerdown", (event) => {
    if (options.zoom && event.pointerType === "mouse") dragged = within(event);
    tellNearest(within(event));
  });
  svg.addEventListener("pointerup", (event) => {
    const from = dragged,
      to = within(event);
    dragged = null;
    if (from !== null && Math.abs(to - from) > 6) {
      const range = [Math.min(from, to), Math.max(from, to)].map((k) =>
        x.invert(Math.min(box.right, Math.max(box.left, k))),
      );
      if (stops.some((stop) => stop >= range[0] && stop <= range[1])) options.zoom(range);
    }
  });
  svg.addEventListener("dblclick", () => options.zoom?.(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") {
      tip.hide();
      options.zoom?.(null);
    }
    if (!step) return;
    event.preventDefault();
    place = Math.min(stops.length - 1, Math.max(0, place < 0 ? (step > 0 ? 0 : stops.length - 1) : place + step));
    tell(stops[place]);
  });
}

function valueText(one, k, options) {
  const margin = one.margin?.[k] ?? null;
  const few = one.n?.[k] < one.seeds && `${one.n[k]} of ${plural(one.seeds, "seed")}`;
  const value = withMargin(one.y[k], margin, options.yFormat);
  return [value, few, options.beside?.(one, k)].filter(Boolean).join(", ");
}
