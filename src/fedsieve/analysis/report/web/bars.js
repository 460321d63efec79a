// Bars, lying and upright.

/** Horizontal bars, each of parts: `rows`: {name, order, parts: [[name, value]]}. */
function bars(id, caption, rows, format, note = null) {
  return chart(
    id,
    caption,
    (plot, width) => {
      const each = 46,
        most = Math.max(...rows.map((row) => row.parts.reduce((sum, [, value]) => sum + value, 0))) || 1;
      const x = scale(0, most, 0, width);
      const told = rows.map(
        (row) => `${row.name}: ${row.parts.map(([name, value]) => `${name} ${format(value)}`).join(", ")}`,
      );
      const svg = element("svg", { width, height: rows.length * each + 4, role: "img", "aria-label": told.join("; ") });
      plot.append(svg);
      const tip = tipIn(plot);
      rows.forEach((row, k) => {
        const top = k * each,
          total = row.parts.reduce((sum, [, value]) => sum + value, 0);
        svg.append(element("text", { class: "strong", x: 0, y: top + 15 }, shortened(row.name, width - 90)));
        svg.append(element("text", { x: width, y: top + 15, "text-anchor": "end" }, format(total)));
        const group = element("g", { class: "series", "data-series": row.name });
        let start = 0;
        row.parts.forEach(([name, value], part) => {
          const at = start;
          const tell = () =>
            tip.show(x(at + value / 2), top + 12, [element("b", {}, name), element("div", {}, format(value))]);
          group.append(
            element("rect", {
              class: "bar",
              x: x(at),
              y: top + 22,
              width: Math.max(1, x(value) - 1.5),
              height: 14,
              rx: 2,
              fill: colour(row.order),
              opacity: 1 / (1 + part * 0.8),
              ...telling(tip, tell),
            }),
          );
          start += value;
        });
        svg.append(group);
      });
    },
    note,
  );
}

const shortened = (text, room) =>
  text.length * 7 <= room ? text : `${text.slice(0, Math.max(4, Math.floor(room / 7) - 1))}…`;

/** Upright bars: `columns`: {label, values: [number], text}, one colour for each place among the values. */
function columns(
  id,
  caption,
  found,
  { label, xLabel, yFormat, yLeast = 0, orders, height = 190, names = true, tick = null },
  note = null,
) {
  return chart(
    id,
    caption,
    (plot, width) => {
      const left = 44,
        bottom = names ? 34 : 24,
        top = 10,
        count = found.length;
      const each = Math.max(7, (width - left) / count),
        full = left + each * count;
      const most = Math.max(...found.flatMap((one) => one.values)) || 1;
      const y = scale(0, most, height - bottom, top);
      const svg = element("svg", { width: full, height, role: "img", "aria-label": label });
      for (const value of ticks(0, most, 4, yLeast)) {
        svg.append(element("line", { class: "gridline", x1: left, x2: full, y1: y(value), y2: y(value) }));
        svg.append(element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, yFormat(value)));
      }
      const longest = Math.max(...found.map((one) => one.label.length)),
        every = Math.ceil((longest * 7 + 8) / each);
      const box = element("div", { class: "scroll" }, svg);
      plot.append(box);
      const tip = tipIn(plot);
      found.forEach((one, k) => {
        const taken = Math.min(72, each - (each > 12 ? 4 : 1)),
          inner = taken / one.values.length,
          gap = (each - taken) / 2;
        const tell = () =>
          tip.show(left + (k + 0.5) * each - box.scrollLeft, y(Math.max(...one.values)), [
            element("b", {}, one.label),
            element("div", {}, one.text),
          ]);
        const group = element("g", { class: "column", ...telling(tip, tell) });
        group.append(
          element("rect", {
            x: left + k * each,
            y: top,
            width: each,
            height: height - bottom - top,
            fill: "transparent",
          }),
        );
        one.values.forEach((value, place) =>
          group.append(
            element("rect", {
              class: "bar",
              x: left + k * each + gap + place * inner,
              y: y(value),
              width: Math.max(1, inner - 0.5),
              height: height - bottom - y(value),
              fill: colour(orders[place]),
            }),
          ),
        );
        svg.append(group);
        const shown = tick ? tick(k) : names && k % every === 0 ? one.label : null;
        if (shown !== null)
          svg.append(
            element(
              "text",
              { x: left + (tick ? k : k + 0.5) * each, y: height - bottom + 15, "text-anchor": "middle" },
              shown,
            ),
          );
      });
      if (tick) svg.append(element("text", { x: full, y: height - bottom + 15, "text-anchor": "end" }, tick(count)));
      svg.append(element("line", { class: "axis", x1: left, x2: full, y1: height - bottom, y2: height - bottom }));
      if (xLabel) svg.append(element("text", { x: full, y: height - 2, "text-anchor": "end" }, xLabel));
    },
    note,
  );
}
