// Heat maps.

const heat = (share) =>
  `color-mix(in srgb, var(--heat-high) ${(100 * Math.min(1, share)).toFixed(1)}%, var(--heat-low))`;

/** A heat map with its numbers: `rows`: {label, cells: [number or null]}, of which `most` is the darkest. */
function numberedMap(id, caption, rows, names, most, { label, rowLabel, format }, note = null) {
  return chart(
    id,
    caption,
    (plot, width) => {
      const left = 52,
        top = 22,
        each = Math.max(34, Math.min(64, (width - left) / names.length)),
        tall = 24;
      const svg = element("svg", {
        width: left + each * names.length,
        height: top + tall * rows.length + 4,
        role: "img",
        "aria-label": label,
      });
      svg.append(element("text", { x: 0, y: 14 }, rowLabel));
      names.forEach((name, k) =>
        svg.append(element("text", { x: left + (k + 0.5) * each, y: 14, "text-anchor": "middle" }, name)),
      );
      const box = element("div", { class: "scroll" }, svg);
      plot.append(box);
      const tip = tipIn(plot);
      rows.forEach((row, k) => {
        svg.append(element("text", { x: left - 10, y: top + k * tall + 16, "text-anchor": "end" }, row.label));
        row.cells.forEach((value, place) => {
          const x = left + place * each,
            y = top + k * tall,
            share = value === null ? 0 : value / (most || 1);
          const tell = () =>
            tip.show(x + each / 2 - box.scrollLeft, y, [
              element("b", {}, `${rowLabel} ${row.label}, ${names[place]}`),
              element("div", {}, value === null ? "no mask here" : percent(value)),
            ]);
          svg.append(
            element("rect", {
              class: value === null ? "cell none" : "cell",
              x,
              y,
              width: each,
              height: tall,
              style: value === null ? null : `fill:${heat(share)}`,
              ...telling(tip, tell),
            }),
          );
          svg.append(
            element(
              "text",
              {
                class: share > 0.7 ? "on-high" : share > 0.437 ? "on-middle" : "on-low",
                x: x + each / 2,
                y: y + 16,
                "text-anchor": "middle",
                style: "pointer-events:none",
              },
              value === null ? "–" : format(value),
            ),
          );
        });
      });
    },
    note,
  );
}

/** A heat map of many cells, drawn as one path for each of a few shades: sharp in print, and quick for 20,000 cells. */
function denseMap(id, caption, counts, { label, names, xLabel, yLabel, tell }, note = null) {
  const shades = 12,
    most = Math.max(1, ...counts.flat()),
    wide = Math.max(1, ...counts.map((row) => row.length));
  const drawing = (plot, width) => {
    const left = 40,
      top = 4;
    const each = Math.max(4, Math.min(Math.max(64, roomFor(names)), (width - left - 2) / wide)),
      tall = Math.max(3, Math.min(18, 380 / counts.length));
    const labels = labelling(names, each),
      base = top + tall * counts.length,
      height = base + labels.height + 18;
    const svg = element("svg", { width: left + each * wide + 2, height, role: "img", "aria-label": label });
    svg.append(element("rect", { class: "none", x: left, y: top, width: each * wide, height: tall * counts.length }));
    const cell = `h${each.toFixed(2)}v${tall.toFixed(2)}h-${each.toFixed(2)}z`;
    const paths = Array.from({ length: shades + 1 }, () => []);
    counts.forEach((row, k) =>
      row.forEach((count, place) => {
        if (count)
          paths[Math.max(1, Math.round((shades * count) / most))].push(
            `M${(left + place * each).toFixed(2)},${(top + k * tall).toFixed(2)}${cell}`,
          );
      }),
    );
    paths.forEach(
      (cells, shade) =>
        cells.length &&
        svg.append(
          element("path", { class: "cells", d: cells.join(""), style: `fill:${heat(0.12 + (0.88 * shade) / shades)}` }),
        ),
    );
    for (const value of ticks(0, counts.length - 1, 5, 1))
      svg.append(
        element("text", { x: left - 6, y: top + (value + 0.5) * tall + 4, "text-anchor": "end" }, whole(value)),
      );
    svg.append(
      ...labels.texts(left, base),
      element("text", { x: left + each * wide, y: height - 4, "text-anchor": "end" }, xLabel),
      element("text", { x: 0, y: height - 4 }, yLabel),
    );
    const box = element("div", { class: "scroll" }, svg);
    plot.append(box);
    const tip = tipIn(plot);
    const tellAt = (event) => {
      const frame = svg.getBoundingClientRect(),
        x = event.clientX - frame.left,
        y = event.clientY - frame.top;
      const row = Math.floor((y - top) / tall),
        column = Math.floor((x - left) / each);
      if (row < 0 || row >= counts.length || column < 0 || column >= wide) return tip.hide();
      tip.show(x - box.scrollLeft, top + row * tall, tell(row, column, counts[row][column] ?? 0));
    };
    svg.addEventListener("pointermove", tellAt);
    svg.addEventListener("pointerdown", tellAt);
    svg.addEventListener("pointerleave", tip.leave);
    plot.append(element("div", { class: "scale", "aria-hidden": "true" }, "0", element("i"), `${whole(most)} samples`));
  };
  return chart(id, caption, drawing, note);
}
