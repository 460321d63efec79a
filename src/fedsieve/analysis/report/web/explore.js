// The page about a data set.

const data = JSON.parse(document.getElementById("data").textContent);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function header() {
  return element(
    "header",
    {},
    element(
      "div",
      {},
      element("h1", {}, data.title),
      data.notes.map((note) => element("p", { class: "about" }, note)),
    ),
    themeButton(),
  );
}

function facts() {
  const [channels, height, width] = data.shape;
  const range = (side) => [...new Set([data.sizes.smallest[side], data.sizes.largest[side]])].map(whole).join(" to ");
  const told = {
    "training images": whole(sum(data.train)),
    "test images": whole(sum(data.test)),
    classes: whole(data.classes.length),
    pixels: data.sizes ? `${range(0)} × ${range(1)}` : `${width} × ${height}`,
    ...(data.sizes && { "shown as": `${width} × ${height}` }),
    channels: channels === 1 ? "grey" : "colour",
  };
  return element(
    "dl",
    { class: "facts" },
    Object.entries(told).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

/** Images with their labels; the figure beneath, if they have one, is a distance. */
function pictures(id, images) {
  return element(
    "div",
    { class: "pictures", id },
    images.map((one) =>
      element(
        "figure",
        {},
        element("img", {
          src: one.image,
          alt: `${one.label}, training image ${one.position}`,
          title: `training image ${one.position}`,
        }),
        element("p", {}, one.label),
        one.figure !== undefined && element("p", {}, one.figure.toFixed(2)),
      ),
    ),
  );
}

function balance() {
  const even = (counts) => new Set(counts).size === 1;
  const range = (counts) =>
    even(counts)
      ? `${whole(counts[0])} in every class`
      : `${whole(Math.min(...counts))} to ${whole(Math.max(...counts))} in a class`;
  const found = data.classes.map((label, k) => ({
    label,
    values: [data.train[k], data.test[k]],
    text: `${whole(data.train[k])} for training, ${whole(data.test[k])} for testing`,
  }));
  const note = `Training images: ${range(data.train)}. Test images: ${range(data.test)}.`;
  const caption = [element("span", { class: "named" }, swatch(0), "training", swatch(1), "test")];
  return section(
    "balance",
    "How many of each class",
    note,
    columns("balance", caption, found, {
      label: `Images by class. ${note}`,
      xLabel: "class",
      yFormat: whole,
      yLeast: 1,
      orders: [0, 1],
    }),
  );
}

const swatch = (order) =>
  element(
    "svg",
    { class: "key", width: 14, height: 12, "aria-hidden": "true" },
    element("rect", { width: 12, height: 12, rx: 2, fill: colour(order) }),
  );

function likeness() {
  return section(
    "likeness",
    "Most and least alike",
    "Euclidean distance of pixels, from 0 to 1 each, to the image at the left.",
    element(
      "div",
      { class: "likeness" },
      element("div", {}, element("h3", {}, "Reference"), pictures("reference", [data.reference])),
      element(
        "div",
        {},
        element("h3", {}, "Most alike"),
        pictures("nearest", data.nearest),
        element("h3", {}, "Least alike"),
        pictures("farthest", data.farthest),
      ),
    ),
  );
}

function spread() {
  const known = data.classes
    .map((label, k) => [label, data.spread[k]])
    .filter(([, value]) => value !== null)
    .sort((one, other) => other[1] - one[1]);
  const found = known.map(([label, value]) => ({ label, values: [value], text: `mean distance ${number(value)}` }));
  const [widest, narrowest] = [known[0], known.at(-1)].map(([label, value]) => `${label} (${number(value)})`);
  const note =
    "Mean distance of a class's training images to their centroid, the widest class first: " +
    `from ${widest} to ${narrowest}.`;
  return section(
    "spread",
    "How far classes spread",
    note,
    columns("spread", null, found, { label: note, xLabel: "class, by spread", yFormat: number, orders: [2] }),
  );
}

function outliers() {
  const { count, by_class, degrees, thresholds, confidence, images } = data.outliers;
  const free = [...new Set(degrees)].filter(Boolean).sort(),
    share = count / sum(data.train),
    channels = data.shape[0];
  const singular = data.train.filter((images, k) => images && degrees[k] < channels),
    few = singular.filter((images) => images <= channels).length,
    flat = singular.length - few;
  const causes = [
    flat && `in ${plural(flat, "class")} colours vary in fewer directions than there are channels, as grey ones do`,
    few && `${plural(few, "class")} ${few === 1 ? "has" : "have"} no more images than channels`,
  ].filter(Boolean);
  const why = causes.length
    ? ` Some covariances are singular (${causes.join("; ")}): of them the pseudo-inverse and the rank are used.`
    : "";
  const freedom = `${free.join(" or ") || "no"} ${free.join() === "1" ? "degree" : "degrees"} of freedom`;
  const note =
    `Training images whose mean colour is farther from their class's than the ${100 * confidence}% point of ` +
    `chi-squared with ${freedom} allows (Mahalanobis distance beyond ${thresholds.join(" or ") || "–"}): ` +
    `${whole(count)}, or ${percent(share)}; of normally distributed colours it would be ${percent(1 - confidence)}.` +
    why;
  const found = data.classes.map((label, k) => ({
    label,
    values: [by_class[k]],
    text: `${plural(by_class[k], "image")} of ${whole(data.train[k])}`,
  }));
  return section(
    "outliers",
    "Colours out of line",
    note,
    count > 0 &&
      columns("outliers", "Out of line by class", found, {
        label: `Colour outliers by class: ${whole(count)} in all`,
        xLabel: "class",
        yFormat: whole,
        yLeast: 1,
        orders: [3],
        tall: 120,
      }),
    count > 0 && element("h3", {}, "The farthest, with their Mahalanobis distances"),
    pictures("outlying", images),
  );
}

fill([
  header(),
  facts(),
  balance(),
  section(
    "samples",
    "Some of them",
    `${plural(data.samples.length, "training image")} at random (seed ${data.seed}).`,
    pictures("sample", data.samples),
  ),
  likeness(),
  spread(),
  outliers(),
  element("footer", {}, `Made by fedsieve ${data.version}.`),
]);
