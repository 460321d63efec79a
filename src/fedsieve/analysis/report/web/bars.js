// Bars, lying and upright.

/** Horizontal bars, each of parts that are named below it: `rows`: {name, order, parts: [[name, value]]}. */
function bars(id, caption, rows, format, note = null) {
  return chart(
    id,
    caption,
    (plot, width) => {
      const each = 64,
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
        const shade = (part) => ({ fill: colour(row.order), opacity: 1 / (1 + part * 0.8) });
        let start = 0,
          free = 0; // up to where names are
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
              ...shade(part),
              ...telling(tip, tell),
            }),
          );
          start += value;
          const text = `${name} ${format(value)}`,
            left = Math.max(free, Math.min(x(at), width - textWidth(text) - 14));
          if (left + textWidth(text) + 14 > width + 1) return; // the tip has it
          group.append(
            element("rect", { x: left, y: top + 42, width: 9, height: 9, rx: 2, ...shade(part) }),
            element("text", { class: "part", x: left + 14, y: top + 51 }, text),
          );
          free = left + textWidth(text) + 28;
        });
        svg.append(group);
      });
    },
    note,
  );
}

const textWidth = (text) => 7 * text.length; // of 12 px, about
const shortened = (text, room) =>
  textWidth(text) <= room ? text : `${text.slice(0, Math.max(4, Math.floor(room / 7) - 1))}…`;
const LONGEST = textWidth("x".repeat(16)); // of names below columns

/** How wide columns must be for their names to lie side by side. */
const roomFor = (names) => Math.max(...names.map((name) => textWidth(shortened(name, LONGEST)))) + 6;

/**
 * Names below columns that are `each` pixels wide: {height, texts: (left, top) -> elements}. They stand upright where
 * they are too long to lie side by side; where they are too many even so, each second, third, … is named.
 */
function labelling(names, each) {
  const cut = names.map((name) => shortened(name, LONGEST)),
    room = roomFor(names);
  const lies = room <= each || cut.every((name) => name.length < 3),
    every = Math.ceil((lies ? room : 13) / each);
  const place = (k, left, top) =>
    lies
      ? { x: left + (k + 0.5) * each, y: top + 15, "text-anchor": "middle" }
      : {
          transform: `translate(${(left + (k + 0.5) * each + 4).toFixed(1)} ${top + 6}) rotate(-90)`,
          "text-anchor": "end",
        };
  return {
    height: lies ? 18 : room + 4,
    texts: (left, top) =>
      cut.flatMap((name, k) => (k % every ? [] : [element("text", { class: "name", ...place(k, left, top) }, name)])),
  };
}

/** Upright bars: `columns`: {label, values: [number], text}, one colour for each place among the values. */
function columns(
  id,
  caption,
  found,
  { label, xLabel, yFormat, yLeast = 0, orders, tall = 150, names = true, tick = null },
  note = null,
) {
  return chart(
    id,
    caption,
    (plot, width) => {
      const left = 44,
        top = 10,
        count = found.length;
      const each = Math.max(7, (width - left) / count),
        full = left + each * count;
      const labels = names ? labelling(found.map((one) => one.label), each) : null,
        base = top + tall,
        height = base + (labels?.height ?? 18) + (xLabel ? 18 : 4);
      const most = Math.max(...found.flatMap((one) => one.values)) || 1;
      const y = scale(0, most, base, top);
      const svg = element("svg", { width: full, height, role: "img", "aria-label": label });
      for (const value of ticks(0, most, 4, yLeast)) {
        svg.append(element("line", { class: "gridline", x1: left, x2: full, y1: y(value), y2: y(value) }));
        svg.append(element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, yFormat(value)));
      }
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
            height: tall,
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
              height: base - y(value),
              fill: colour(orders[place]),
            }),
          ),
        );
        svg.append(group);
        if (tick && tick(k) !== null)
          svg.append(element("text", { x: left + k * each, y: base + 15, "text-anchor": "middle" }, tick(k)));
      });
      if (labels) svg.append(...labels.texts(left, base));
      if (tick) svg.append(element("text", { x: full, y: base + 15, "text-anchor": "end" }, tick(count)));
      svg.append(element("line", { class: "axis", x1: left, x2: full, y1: base, y2: base }));
      if (xLabel) svg.append(element("text", { x: full, y: height - 2, "text-anchor": "end" }, xLabel));
    },
    note,
  );
}
