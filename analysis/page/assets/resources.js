/* Resources of clients over device time: one line per client, from the tasks that have ended. */
"use strict";

const MEASURES = {
  peak: {title: "Peak memory, % of the cap", axis: "percent"},
  cpu: {title: "CPU time of a task (host)", axis: "time"},
  bytes: {title: "Bytes up and down, sum so far", axis: "bytes", sum: true},
  joules: {title: "Energy of tasks, sum so far (modelled)", axis: "joules", sum: true},
  loss: {title: "Training loss of a task", axis: "loss"},
};

/* The measures that every run has, and the metrics that this one reported for its tasks. */
function measuresOf(run) {
  const reported = Object.keys(run.tasks?.metrics ?? {}).map((name) => [`metric ${name}`, {title: `${name}, as reported for a task`, axis: "loss", metric: name}]);
  return {...MEASURES, ...Object.fromEntries(reported)};
}

/* The lines of a run for one measure, by name of the client: device times and values. */
function resourceLines(run, payload, measure) {
  const {sum, metric} = measuresOf(run)[measure];
  const cap = payload.columns.indexOf("cap_bytes");
  const unit = {peak: 1024, cpu: 1e-3, bytes: 1, joules: 1e-2, loss: 1e-3}[measure] ?? 1;
  const values = metric === undefined ? run.tasks[measure] : run.tasks.metrics[metric];
  const rows = new Map(run.clients.map((row) => [Number(row[0]), row]));
  const lines = new Map();
  const order = unpack(run.tasks, payload.phases).map((task, i) => ({...task, value: values[i]}));
  order.sort((a, b) => a.end - b.end);
  for (const task of order) {
    if (task.value === null) continue;
    const row = rows.get(task.client);
    const line = lines.get(row[0]) ?? {name: row[0], device: row[payload.columns.indexOf("device")], x: [], y: []};
    const value = (task.value * unit) / (measure === "peak" ? row[cap] : 1);
    line.x.push(task.end);
    line.y.push(sum ? value + (line.y.at(-1) ?? 0) : value);
    lines.set(row[0], line);
  }
  return lines;
}

/* Draws lines with their axes. Energy and bytes are sums, so they begin at 0. */
function timeLines(box, lines, {axis, title}, height) {
  const drawn = lines.filter((line) => line.x.length);
  if (!drawn.length) {
    box.replaceChildren(element("p", {class: "note"}, `${title}: nothing was measured.`));
    return () => {};
  }
  const right = Math.max(...drawn.map((line) => line.x.at(-1)));
  const [xSize, xUnit] = scale(right, "time");
  let [bottom, top] = [0, axis === "percent" ? 1 : 0];
  for (const line of drawn) for (const value of line.y) [bottom, top] = [Math.min(bottom, value), Math.max(top, value)];
  top = top * 1.05 || (bottom ? 0 : 1);
  const [ySize, yUnit] = scale(Math.max(top, -bottom), axis);
  return redrawOnResize(box, (width) => {
    const pad = {left: 48, right: 12, top: 24, bottom: 38};
    const x = (value) => pad.left + (value / right) * (width - pad.left - pad.right);
    const y = (value) => height - pad.bottom - ((value - bottom) / (top - bottom)) * (height - pad.top - pad.bottom);
    const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title} against device time`});
    for (const value of ticks(bottom / ySize, top / ySize, (height - 60) / 40)) {
      root.append(svg("path", {class: "grid", d: `M${pad.left} ${y(value * ySize)}H${width - pad.right}`}));
      root.append(svg("text", {x: pad.left - 8, y: y(value * ySize) + 4, "text-anchor": "end"}, tickText(value)));
    }
    for (const value of ticks(0, right / xSize, width / 90)) {
      root.append(svg("text", {x: x(value * xSize), y: height - pad.bottom + 16, "text-anchor": "middle"}, tickText(value)));
    }
    root.append(svg("path", {class: "axis", d: `M${pad.left} ${height - pad.bottom}H${width - pad.right}`}));
    root.append(svg("text", {x: 0, y: 12}, yUnit && axis !== "percent" ? `${title} (${yUnit})` : title));
    root.append(svg("text", {x: (pad.left + width - pad.right) / 2, y: height - 4, "text-anchor": "middle"}, `Device time (${xUnit})`));
    if (axis === "percent") root.append(svg("path", {class: "target", d: `M${pad.left} ${y(1)}H${width - pad.right}`}));
    for (const line of drawn) {
      const d = line.x.map((value, i) => `${i ? "L" : "M"}${x(value).toFixed(1)} ${y(line.y[i]).toFixed(1)}`).join("");
      const path = svg("path", {class: "line thin", stroke: `var(--c${line.colour})`, d});
      path.append(svg("title", {}, `client ${line.name} (${line.device}): ${quantity(line.y.at(-1), axis)} at the end`));
      root.append(path);
      if (line.x.length <= 60) {
        for (const [i, value] of line.x.entries()) root.append(svg("circle", {cx: x(value).toFixed(1), cy: y(line.y[i]).toFixed(1), r: 1.8, fill: `var(--c${line.colour})`}));
      }
    }
    box.replaceChildren(root);
  });
}

function kindsOf(run, payload) {
  const place = payload.columns.indexOf("device");
  return [...new Set(run.clients.map((row) => row[place]))];
}

/* The section with all clients, those of one kind, or one of them. */
class Resources {
  constructor(root) {
    this.measure = root.querySelector("#measure");
    this.whose = root.querySelector("#whose");
    this.legend = root.querySelector("#resource-legend");
    this.box = root.querySelector("#resource-chart");
    for (const select of [this.measure, this.whose]) select.addEventListener("change", () => this.draw());
    this.end = () => {};
  }

  show(run, payload) {
    Object.assign(this, {run, payload, kinds: kindsOf(run, payload)});
    const option = (value, text) => element("option", {value}, text);
    keepChoice(this.measure, Object.entries(measuresOf(run)).map(([value, {title}]) => option(value, title)));
    const options = [option("all", "all clients"), ...this.kinds.map((kind) => option(`kind ${kind}`, kind)), ...run.clients.map((row) => option(`client ${row[0]}`, `client ${row[0]}`))];
    keepChoice(this.whose, options);
    this.draw();
  }

  draw() {
    this.end();
    if (!this.run.tasks) {
      this.legend.replaceChildren();
      this.box.replaceChildren(element("p", {class: "note"}, "The tasks of this run are omitted to keep the page small; write a report of its folder alone to see them."));
      return;
    }
    const lines = [...resourceLines(this.run, this.payload, this.measure.value).values()];
    for (const line of lines) line.colour = this.kinds.indexOf(line.device) % COLOURS;
    const chosen = lines.filter((line) => ["all", `kind ${line.device}`, `client ${line.name}`].includes(this.whose.value));
    const shown = this.kinds.filter((kind) => chosen.some((line) => line.device === kind));
    this.legend.replaceChildren(swatches(shown.map((kind) => [`c${this.kinds.indexOf(kind) % COLOURS}`, kind])));
    this.end = timeLines(this.box, chosen, measuresOf(this.run)[this.measure.value], 300);
  }
}

/* One small chart per measure, for the page of a client. */
function clientCharts(box, run, payload, name) {
  if (!run.tasks) return;
  for (const [measure, about] of Object.entries(measuresOf(run))) {
    const line = resourceLines(run, payload, measure).get(name);
    const chart = element("div", {class: "chart"});
    box.append(chart);
    timeLines(chart, line ? [{...line, colour: 0}] : [], about, 170);
  }
}
