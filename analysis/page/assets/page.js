/* Assembles the page: the charts of the study once, the parts of a run whenever another run is selected. */
"use strict";

/* `text` lists the columns with words, `wrap` is the column with sentences. */
function table(heads, rows, {text = [], wrap = null} = {}) {
  const kind = (place) => place === wrap ? "wrap" : text.includes(place) ? "text" : null;
  const head = element("tr", {}, ...heads.map((title, place) => element("th", {scope: "col", class: kind(place) && "text"}, title)));
  const body = element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, place) => {
    if (place === 0) return element("th", {scope: "row"}, cell);
    return element("td", {class: kind(place)}, cell instanceof Node ? cell : String(cell));
  }))));
  return element("div", {class: "scroll"}, element("table", {}, element("thead", {}, head), body));
}

const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];

/* One line per device kind and variant. */
function fleet(box, rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.device}\n${row.link}\n${row.variant}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const lines = [...groups.values()].map((members) => {
    const [one] = members;
    const peaks = members.map((row) => row.peak_bytes).filter((value) => value !== null);
    const peak = peaks.length ? Math.max(...peaks) : null;
    const memory = element("span", {}, ...(peak === null ? [] : [meter(peak, one.cap_bytes)]),
      `${quantity(one.predicted_bytes, "bytes")} / ${quantity(peak, "bytes")} / ${quantity(one.cap_bytes, "bytes")}`);
    const device = element("span", {}, one.device_title, element("small", {}, `${digits(one.rate_gflops)} GFLOPS, ${one.link}`));
    return [device, members.length, one.variant ?? element("span", {class: "bad"}, "unfit"), memory, one.reason];
  });
  box.replaceChildren(table(["Device", "Clients", "Variant", "Memory: predicted / peak / cap", "Why not a larger variant"], lines, {text: [2], wrap: 4}));
}

function stragglers(root, run, payload) {
  const {rounds} = run;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const sentences = [];
  if (run.in_rounds && rounds.duration.length) {
    const both = rounds.duration.map((value, i) => [value, rounds.without[i] ?? value]);
    const whole = sum(both.map(([value]) => value));
    const without = sum(both.map(([, value]) => value));
    sentences.push(`A round took ${quantity(whole / both.length, "time")} of device time on average, and would have taken ${quantity(without / both.length, "time")} without its last client (${percent((whole - without) / whole)} less).`);
    const spared = run.participation.filter((row) => row.without_s !== null).sort((a, b) => a.without_s - b.without_s)[0];
    const average = whole / both.length;
    if (spared && spared.without_s < 0.99 * average) {
      const title = run.clients.find((row) => row[payload.columns.indexOf("device")] === spared.device)[payload.columns.indexOf("device_title")];
      sentences.push(`Without the ${spared.clients} × ${title} a round would take ${quantity(spared.without_s, "time")} (${percent((average - spared.without_s) / average)} less).`);
    }
    sentences.push(`Finished clients waited for the others for ${percent(rounds.idle / (rounds.idle + rounds.busy))} of the time.`);
  } else if (rounds.duration.length) {
    sentences.push(`Results are merged as they arrive, so no client waits: ${rounds.duration.length} merges, one every ${quantity(sum(rounds.duration) / rounds.duration.length, "time")} of device time on average.`);
  }
  const flops = sum(run.clients.map((row) => row[payload.columns.indexOf("flops")]));
  const lost = sum(run.waste.map((row) => row.flops));
  if (flops) sentences.push(lost ? `${percent(lost / flops)} of all computation was wasted.` : "No computation was wasted.");
  root.querySelector("#straggler-summary").textContent = sentences.join(" ");

  const waited = run.rounds.waited_for.slice(0, 8).map(([client, times, seconds]) => [clientName(run, payload, client), times, quantity(seconds, "time")]);
  root.querySelector("#waited-for").replaceChildren(waited.length ? table(["Client", "Rounds", "Time for it alone"], waited) : element("p", {class: "note"}, "Under this policy no round waits for its last client."));
  const waste = run.waste.map((row) => [row.outcome === "ok" ? "ok, after the last merge" : row.outcome, row.tasks, quantity(row.flops, "flops"), quantity(row.bytes, "bytes"), quantity(row.joules, "joules"), quantity(row.device_s, "time")]);
  root.querySelector("#waste").replaceChildren(waste.length ? table(["Outcome", "Tasks", "FLOPs", "Bytes", "Energy", "Device time"], waste) : element("p", {class: "note"}, "No work was wasted."));
  root.querySelector("#participation").replaceChildren(table(["Device", "Clients", "Tasks", "Merged", "Waited for", "Round without it"],
    run.participation.map((row) => [row.device, row.clients, row.tasks, row.tasks ? `${row.merged} (${percent(row.merged / row.tasks)})` : MISSING, row.last, quantity(row.without_s, "time")])));
  const bins = doubling(run.staleness);
  const most = Math.max(1, ...bins.map(([, count]) => count));
  const stale = run.staleness.some(([merges]) => merges > 0);
  root.querySelector("#staleness").replaceChildren(!stale ? element("p", {class: "note"}, "All merged results were fresh: no merge happened between sending a model and its result.") : table(["Merges missed", "Results", ""], bins.map(([merges, count]) => [merges, count, meterOf(count / most)])));
}

/* Bins 0, 1, 2, 3 to 4, 5 to 8 and so on: a few lines for any staleness. */
function doubling(counts) {
  const bins = new Map();
  for (const [merges, count] of counts) {
    const high = merges < 2 ? merges : 2 ** Math.ceil(Math.log2(merges));
    const name = high <= 2 ? String(high) : `${high / 2 + 1} to ${high}`;
    bins.set(name, (bins.get(name) ?? 0) + count);
  }
  return [...bins.entries()];
}

function meterOf(share) { return element("span", {class: "meter"}, element("i", {style: `width: ${(100 * share).toFixed(0)}%`})); }

const X_LABELS = {time: "Device time", rounds: "Round", bytes: "Bytes up and down, whole fleet", joules: "Energy, whole fleet", loss: "Device time"};

/* The charts of accuracy, loss and metrics of merges, one series at a time: different series must not be compared. */
class Curves {
  constructor(root) {
    this.root = root;
    this.select = root.querySelector("#series");
    this.metric = root.querySelector("#merge-metric");
    this.ends = [];
    for (const select of [this.select, this.metric]) select.addEventListener("change", () => this.draw());
  }

  show(payload) {
    this.payload = payload;
    keepChoice(this.select, payload.groups.map((group, place) => element("option", {value: place}, `${group.shown}: ${group.title}`)));
    this.root.querySelector("#series-bar").hidden = payload.groups.length < 2;
    keepChoice(this.metric, payload.metrics.map(({name}, place) => element("option", {value: place}, name)));
    this.root.querySelector("#merge-metrics").hidden = !payload.metrics.length;
    this.draw();
  }

  draw() {
    const {payload, root} = this;
    const group = payload.groups[Number(this.select.value)];
    const series = payload.series.filter((one) => one.shown === group.shown);
    const seeds = Math.max(0, ...payload.curves.rounds.map((curve) => curve?.seeds ?? 0));
    this.ends.forEach((end) => end());
    root.querySelector("#legend").replaceChildren(legend(series, seeds > 1 ? `Lines: mean over up to ${seeds} seeds; bands: ± 1 standard deviation` : ""));
    this.ends = [...root.querySelectorAll("[data-axis]")].map((box) => {
      const {axis, height} = box.dataset;
      return lineChart(box, this.measure(axis, group), payload, group, X_LABELS[axis], Number(height));
    });
    const chosen = payload.metrics[Number(this.metric.value)];
    if (!chosen) return;
    const about = {axis: "time", curves: chosen.curves, title: chosen.name};
    this.ends.push(lineChart(root.querySelector("#merge-metric-chart"), about, payload, group, X_LABELS.time, 230));
  }

  /* Accuracy, or the error of labels that are numbers, against an axis; or the loss. */
  measure(axis, {targets, range}) {
    const {curves, losses, metric} = this.payload;
    if (axis === "loss") return {axis: "time", curves: losses, title: "Test loss"};
    return {axis, curves: curves[axis], title: `Test ${metric.title.toLowerCase()}`, targets, range, isShare: metric.name === "accuracy"};
  }
}

/* Replaces the options of a list, and selects again what was selected. */
function keepChoice(select, options) {
  const kept = select.value;
  select.replaceChildren(...options);
  if (options.some((option) => option.value === kept)) select.value = kept;
}

/* The whole page; `show` can be called again with newer data, and keeps what the reader has chosen. */
class Page {
  constructor() {
    this.curves = new Curves(document);
    this.timeline = new Timeline(document);
    this.resources = new Resources(document);
    this.clients = new ClientTable(document);
    this.select = document.querySelector("#run");
    this.select.addEventListener("change", () => this.showRun());
    document.addEventListener("click", (event) => copy(event.target.closest("[data-copy]")));
  }

  show(payload) {
    this.payload = payload;
    this.clients.judgeBy(payload.metric);
    this.curves.show(payload);
    keepChoice(this.select, payload.runs.map((run) => element("option", {value: run.label}, run.label + (run.state ? ` (${run.state})` : ""))));
    this.showRun();
  }

  showRun() {
    const {payload} = this;
    const run = payload.runs.find((one) => one.label === this.select.value) ?? payload.runs[0];
    document.querySelector("#rounds-caption").textContent = run.in_rounds
      ? "Rounds, by phase of the client that finished last" : "Results in the order of their merge, from dispatch to merge";
    fleet(document.querySelector("#fleet-table"), records(run, payload));
    stragglers(document, run, payload);
    roundChart(document.querySelector("#rounds"), run, payload, (number) => {
      this.timeline.openRound(number);
      document.querySelector("#timeline").scrollIntoView({block: "center"});
    });
    this.timeline.show(run, payload);
    this.resources.show(run, payload);
    this.clients.show(run, payload);
  }
}

async function copy(button) {
  if (!button) return;
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  button.textContent = "Copied";
}
