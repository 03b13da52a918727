/* Small helpers and the line chart. No libraries: the page is self-contained. */
"use strict";

const DASHES = {sync: "", deadline: "7 4", "over-select": "7 3 2 3", async: "2 3", buffered: "4 2 1 2"};
const MISSING = "–";
const COLOURS = 11; // --c0 and so on in the style sheet

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function svg(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

/* Units: the same rules as in the tables of the page. */
const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const BINARY = [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const SPANS = [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"]];
const UNITS = {joules: "J", flops: "FLOP"};

function scale(largest, axis) {
  if (axis === "time") {
    for (const [least, size, unit] of SPANS) if (largest >= least) return [size, unit];
    return largest > 0 && largest < 1 ? [1e-3, "ms"] : [1, "s"];
  }
  if (axis === "rounds" || axis === "loss") return [1, ""];
  if (axis === "percent") return [0.01, "%"];
  if (axis === "bytes") return BINARY.find(([size]) => largest >= size) ?? [1, "B"];
  for (const [size, prefix] of PREFIXES) if (largest >= size) return [size, prefix + UNITS[axis]];
  return [1, UNITS[axis]];
}

function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u2009");
  if (size >= 10) return value.toFixed(1);
  return size >= 0.995 ? value.toFixed(2) : String(Number(value.toPrecision(3)));
}

function quantity(value, axis) {
  if (value === null || value === undefined) return MISSING;
  const [size, unit] = scale(Math.abs(value), axis);
  return unit ? digits(value / size) + "\u00a0" + unit : digits(value / size);
}

const percent = (value) => value === null || value === undefined ? MISSING : (100 * value).toFixed(1) + "\u00a0%";

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) found.push(place * step);
  return found;
}

const tickText = (value) => Number(value.toPrecision(6)).toLocaleString("en").replaceAll(",", "\u2009");

/* Draws at once and whenever the width changes. Returns a function that stops this. */
function redrawOnResize(box, draw) {
  let width = 0;
  const update = () => {
    if (box.clientWidth && box.clientWidth !== width) {
      width = box.clientWidth;
      draw(width);
    }
  };
  const observer = new ResizeObserver(update);
  observer.observe(box);
  update();
  return () => observer.disconnect();
}

function marker(kind, x, y, size) {
  const r = size;
  const shapes = [
    () => svg("circle", {cx: x, cy: y, r}),
    () => svg("rect", {x: x - r, y: y - r, width: 2 * r, height: 2 * r}),
    () => svg("path", {d: `M${x} ${y - 1.2 * r}l${1.2 * r} ${2.2 * r}h${-2.4 * r}z`}),
    () => svg("path", {d: `M${x} ${y - 1.4 * r}l${1.4 * r} ${1.4 * r}l${-1.4 * r} ${1.4 * r}l${-1.4 * r} ${-1.4 * r}z`}),
    () => svg("path", {d: `M${x} ${y + 1.2 * r}l${1.2 * r} ${-2.2 * r}h${-2.4 * r}z`}),
    () => svg("path", {d: `M${x - 1.2 * r} ${y - 0.45 * r}h${2.4 * r}v${0.9 * r}h${-2.4 * r}zM${x - 0.45 * r} ${y - 1.2 * r}h${0.9 * r}v${2.4 * r}h${-0.9 * r}z`}),
  ];
  return shapes[kind % shapes.length]();
}

/* `note` explains what is drawn besides the lines. */
function legend(series, note = "") {
  const list = element("ul", {class: "legend"});
  for (const one of series) {
    const swatch = svg("svg", {viewBox: "0 0 30 12", "aria-hidden": "true"});
    const colour = `var(--c${one.colour})`;
    swatch.append(svg("path", {d: "M0 6h30", class: "line", stroke: colour, "stroke-dasharray": DASHES[one.policy]}));
    const dot = marker(one.marker, 15, 6, 3);
    dot.setAttribute("fill", colour);
    swatch.append(dot);
    list.append(element("li", {}, swatch, one.label));
  }
  if (note) list.append(element("li", {class: "note"}, note));
  return list;
}

/* `curves` against `axis`, for the methods that show the same series: means, a band of one standard deviation, target
   lines, and the values at the pointer. Without `range` the chart is as high as the values are. Steps show when a model
   was available; against rounds the lines are slopes, which are easier to distinguish. A value of null is a gap: all
   models had diverged. */
function lineChart(box, {axis, curves, title, targets = [], range = null, isShare = false}, payload, group, xLabel, height) {
  const drawn = payload.series
    .map((one, place) => ({...one, curve: curves[place]}))
    .filter((one) => one.shown === group.shown && one.curve !== null);
  if (!drawn.length) {
    box.replaceChildren(element("p", {class: "note"}, axis === "joules" && payload.curves.rounds.some((curve) => curve !== null)
      ? "No device in this fleet states its power." : payload.unevaluated));
    return () => {};
  }
  const [size, unit] = scale(Math.max(...drawn.map((one) => one.curve.x.at(-1))), axis);
  const edges = (sign) => drawn.flatMap(({curve}) => curve.mean
    .map((mean, i) => mean === null ? null : mean + sign * (curve.sd ? curve.sd[i] : 0)).filter((value) => value !== null));
  const [bottom, top] = range ?? valueRange(edges(-1), edges(1));
  const valueText = (value) => isShare ? (100 * value).toFixed(1) : digits(value);
  const right = Math.max(...drawn.map((one) => one.curve.x.at(-1))) / size || 1;

  return redrawOnResize(box, (width) => {
    const pad = {left: 42, right: targets.length ? 44 : 12, top: 10, bottom: 40};
    const x = (value) => pad.left + (value / right) * (width - pad.left - pad.right);
    const y = (value) => height - pad.bottom - ((value - bottom) / (top - bottom)) * (height - pad.top - pad.bottom);
    const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `${title} against ${xLabel.toLowerCase()}`});
    for (const value of ticks(bottom, top, (height - 50) / 45)) {
      root.append(svg("path", {class: "grid", d: `M${pad.left} ${y(value)}H${width - pad.right}`}));
      root.append(svg("text", {x: pad.left - 8, y: y(value) + 4, "text-anchor": "end"}, isShare ? String(Math.round(value * 1000) / 10) : tickText(value)));
    }
    for (const value of ticks(0, right, width / 90)) {
      root.append(svg("path", {class: "axis", d: `M${x(value)} ${height - pad.bottom}v4`}));
      root.append(svg("text", {x: x(value), y: height - pad.bottom + 17, "text-anchor": "middle"}, tickText(value)));
    }
    root.append(svg("path", {class: "axis", d: `M${pad.left} ${height - pad.bottom}H${width - pad.right}`}));
    root.append(svg("text", {x: (pad.left + width - pad.right) / 2, y: height - 5, "text-anchor": "middle"}, xLabel + (unit ? ` (${unit})` : "")));
    for (const target of targets) { // the label stands outside, where it covers no curve
      root.append(svg("path", {class: "target", d: `M${pad.left} ${y(target)}H${width - pad.right}`}));
      root.append(svg("text", {x: width - pad.right + 4, y: y(target) + 4}, isShare ? `${Number((100 * target).toFixed(3))}\u00a0%` : tickText(target)));
    }
    for (const one of drawn) {
      const colour = `var(--c${one.colour})`;
      const xs = one.curve.x.map((value) => x(value / size).toFixed(1));
      const slopes = axis === "rounds";
      const point = (value, i) => `${xs[i]} ${y(value).toFixed(1)}`;
      // one piece of line for each stretch without a gap; steps continue to the start of the gap
      const pieces = stretches(one.curve.mean);
      const forth = (values, piece) => piece.map((i, place) =>
        (place === 0 ? "M" : slopes ? "L" : `H${xs[i]}L`) + point(values[i], i)).join("");
      const back = (values, piece) => piece.map((i) =>
        (slopes ? "L" : `V${y(values[i]).toFixed(1)}L`) + point(values[i], i)).reverse().join("");
      const step = (piece) => slopes || piece.at(-1) + 1 >= xs.length ? "" : `H${xs[piece.at(-1) + 1]}`;
      if (one.curve.sd) {
        const upper = one.curve.mean.map((mean, i) => mean + one.curve.sd[i]);
        const lower = one.curve.mean.map((mean, i) => mean - one.curve.sd[i]);
        const d = pieces.map((piece) => forth(upper, piece) + back(lower, piece) + "Z").join("");
        root.append(svg("path", {class: "band", fill: colour, d}));
      }
      const d = pieces.map((piece) => forth(one.curve.mean, piece) + step(piece)).join("");
      root.append(svg("path", {class: "line", stroke: colour, "stroke-dasharray": DASHES[one.policy], d}));
      const every = Math.max(1, Math.ceil(xs.length / 9));
      for (let i = every - 1; i < xs.length; i += every) {
        if (one.curve.mean[i] === null) continue;
        const dot = marker(one.marker, Number(xs[i]), y(one.curve.mean[i]), 3.2);
        dot.setAttribute("fill", colour);
        root.append(dot);
      }
    }
    box.replaceChildren(root);
    reading(box, root, drawn, {x, size, right, axis, pad, width, height, valueText, unit: isShare ? " %" : ""});
  });
}

/* The ends of an axis for values of any size and sign. */
function valueRange(low, high) {
  const [bottom, top] = [Math.min(...low), Math.max(...high)];
  const room = 0.05 * (top - bottom) || 0.05 * Math.abs(top) || 1;
  return [bottom >= 0 ? Math.max(0, bottom - room) : bottom - room, top + room];
}

/* The indices of consecutive values without a null between them. */
function stretches(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) found.push([]);
    found.at(-1).push(i);
  });
  return found;
}

function reading(box, root, drawn, view) {
  const line = svg("path", {class: "cursor", d: "", visibility: "hidden"});
  root.append(line);
  const tip = element("div", {class: "tip", hidden: ""});
  box.append(tip);
  const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  root.addEventListener("pointerleave", hide);
  root.addEventListener("pointermove", (event) => {
    const bounds = root.getBoundingClientRect();
    const at = (event.clientX - bounds.left) * (view.width / bounds.width);
    const value = ((at - view.pad.left) / (view.width - view.pad.left - view.pad.right)) * view.right * view.size;
    if (value < 0 || value > view.right * view.size) return hide();
    const heading = view.axis === "rounds" ? `round ${Math.floor(value)}` : quantity(value, view.axis);
    tip.replaceChildren(element("b", {}, heading), ...drawn.map((one) => {
      const place = one.curve.x.findLastIndex((x) => x <= value);
      const mean = place < 0 ? null : one.curve.mean[place];
      if (mean === null) return element("div", {}, `${one.label} ${place < 0 ? MISSING : "diverged"}`);
      const spread = one.curve.sd ? ` ± ${view.valueText(one.curve.sd[place])}` : "";
      return element("div", {}, `${one.label} ${view.valueText(mean)}${spread}${view.unit}`);
    }));
    tip.hidden = false;
    line.setAttribute("visibility", "visible");
    line.setAttribute("d", `M${at} ${view.pad.top}V${view.height - view.pad.bottom}`);
    const place = at + 14 + tip.offsetWidth > view.width ? at - tip.offsetWidth - 14 : at + 14;
    tip.style.transform = `translate(${Math.max(0, place)}px, ${view.pad.top}px)`;
  });
}
