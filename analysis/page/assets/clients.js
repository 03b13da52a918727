/* The table of clients: chosen columns, sorting, filtering, values relative to the median of a kind, a page per client. */
"use strict";

const COLUMNS = [
  {key: "client", title: "Client"},
  {key: "device", title: "Device", text: true},
  {key: "link", title: "Link", text: true, off: true},
  {key: "variant", title: "Variant", text: true},
  {key: "samples", title: "Samples", axis: "rounds", off: true},
  {key: "tasks", title: "Tasks", axis: "rounds"},
  {key: "merged", title: "Merged", axis: "rounds", off: true},
  {key: "failed", title: "Failed, late", axis: "rounds"},
  {key: "last", title: "Waited for", axis: "rounds"},
  {key: "device_s", title: "Device time", axis: "time"},
  {key: "compute_s", title: "Compute", axis: "time"},
  {key: "download_s", title: "Download", axis: "time", off: true},
  {key: "upload_s", title: "Upload", axis: "time", off: true},
  {key: "cpu_s", title: "CPU (host)", axis: "time"},
  {key: "throttled_s", title: "Throttled (host)", axis: "time", off: true},
  {key: "peak_bytes", title: "Peak memory / cap", axis: "bytes", meter: "cap_bytes"},
  {key: "flops", title: "FLOPs", axis: "flops", off: true},
  {key: "bytes_down", title: "Down", axis: "bytes"},
  {key: "bytes_up", title: "Up", axis: "bytes"},
  {key: "joules", title: "Energy (modelled)", axis: "joules"},
  {key: "idle_joules", title: "Idle energy (modelled)", axis: "joules", off: true},
  {key: "accuracy", title: "Accuracy", format: percent},
];
const FAILURES = ["late", "oom", "crash", "hang", "offline", "refused", "diverged"];

function records(run, payload) {
  return run.clients.map((values) => {
    const row = Object.fromEntries(payload.columns.map((name, place) => [name, values[place]]));
    row.failed = row.tasks - row.ok;
    return row;
  });
}

function meter(part, whole) {
  const share = Math.min(1, part / whole);
  const fill = element("i", {style: `width: ${(100 * share).toFixed(0)}%`});
  if (share > 0.95) fill.className = "full";
  return element("span", {class: "meter", title: `${percent(share)} of the memory cap`}, fill);
}

class ClientTable {
  constructor(root) {
    this.box = root.querySelector("#client-table");
    this.search = root.querySelector("#search");
    this.kind = root.querySelector("#kind");
    this.outcome = root.querySelector("#outcome");
    this.relative = root.querySelector("#relative");
    this.count = root.querySelector("#client-count");
    this.dialog = document.querySelector("#client-page");
    this.sort = {key: "client", down: false};
    this.off = new Set(COLUMNS.filter((column) => column.off).map((column) => column.key));
    this.chooser(root.querySelector("#columns"));
    for (const input of [this.search, this.kind, this.outcome, this.relative]) input.addEventListener("input", () => this.draw());
    this.dialog.querySelector(".close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
    this.dialog.addEventListener("close", () => history.replaceState(null, "", "#clients"));
  }

  /* What clients are judged by: an accuracy, or an error in the unit of the labels. */
  judgeBy({name, title}) {
    const column = COLUMNS.find((one) => one.key === "accuracy");
    const errorText = (value) => value === null ? MISSING : digits(value);
    Object.assign(column, {title, format: name === "accuracy" ? percent : errorText});
    document.querySelector("[data-column=accuracy]").parentNode.lastChild.replaceWith(title);
  }

  get columns() { return COLUMNS.filter((column) => !this.off.has(column.key)); }

  chooser(box) {
    for (const column of COLUMNS.slice(1)) {
      const input = element("input", {type: "checkbox", "data-column": column.key});
      input.checked = !this.off.has(column.key);
      input.addEventListener("change", () => {
        this.off[input.checked ? "delete" : "add"](column.key);
        this.draw();
      });
      box.append(element("label", {}, input, column.title));
    }
  }

  show(run, payload) {
    this.run = run;
    this.payload = payload;
    this.rows = records(run, this.payload);
    const fill = (select, first, values) => {
      const kept = select.value;
      select.replaceChildren(element("option", {value: ""}, first), ...values.map((value) => element("option", {value}, value)));
      if (values.includes(kept)) select.value = kept;
    };
    fill(this.kind, "all devices", [...new Set(this.rows.map((row) => row.device))]);
    fill(this.outcome, "any outcome", FAILURES.filter((name) => this.rows.some((row) => row[name])).concat("unfit"));
    this.draw();
  }

  chosen() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => [row.client, row.device, row.link, row.variant ?? "unfit", row.reason].join(" ").toLowerCase();
    const rows = this.rows.filter((row) => words.every((word) => text(row).includes(word))
      && (!this.kind.value || row.device === this.kind.value)
      && (!this.outcome.value || (this.outcome.value === "unfit" ? row.variant === null : row[this.outcome.value] > 0)));
    const {key, down} = this.sort;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    return rows.sort((a, b) => {
      if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null); // unknown always last
      return (down ? -1 : 1) * compare(a[key], b[key]) || compare(a.client, b.client);
    });
  }

  draw() {
    const rows = this.chosen();
    const head = element("tr");
    for (const column of this.columns) {
      const sorted = this.sort.key === column.key ? (this.sort.down ? "descending" : "ascending") : null;
      const button = element("button", {type: "button", "data-key": column.key}, column.title);
      button.addEventListener("click", () => {
        const again = this.sort.key === column.key;
        // the first click sorts figures from the largest, names alphabetically
        this.sort = {key: column.key, down: again ? !this.sort.down : Boolean(column.axis || column.format)};
        this.draw();
        this.box.querySelector(`[data-key="${column.key}"]`).focus();
      });
      head.append(element("th", {scope: "col", class: column.text || column.key === "client" ? "text" : null, "aria-sort": sorted}, button));
    }
    const body = element("tbody");
    for (const row of rows) body.append(element("tr", {}, ...this.columns.map((column) => this.cell(row, column))));
    this.box.replaceChildren(element("table", {}, element("thead", {}, head), body));
    this.count.textContent = `${rows.length} of ${this.rows.length} clients`;
  }

  cell(row, column) {
    const value = row[column.key];
    if (column.key === "client") {
      const button = element("button", {type: "button"}, value);
      button.addEventListener("click", () => this.page(row));
      return element("th", {scope: "row"}, button);
    }
    if (column.text) return element("td", {class: value === null ? "text bad" : "text"}, value ?? "unfit");
    if (this.relative.checked) return element("td", {}, this.against(row, column.key));
    const text = column.format ? column.format(value) : quantity(value, column.axis);
    if (column.meter && value !== null) return element("td", {}, meter(value, row[column.meter]), `${text} / ${quantity(row[column.meter], column.axis)}`);
    return element("td", {class: column.key === "failed" && value ? "bad" : null}, text);
  }

  against(row, key) {
    const median = key === "failed" ? null : this.run.medians[row.device]?.[key];
    if (row[key] === null || !median) return MISSING;
    return `${(row[key] / median).toFixed(2)}×`;
  }

  page(row) {
    const body = this.dialog.querySelector("div");
    const share = (part) => `flex: ${Math.max(0, part)} 0 0; background: `;
    const stack = element("div", {class: "stack"}, ...this.payload.phases.map((phase) => element("i", {style: `${share(row[`${phase}_s`])}var(--${phase})`})));
    const figures = element("tbody");
    const more = [{key: "wait_s", title: "Waiting time", axis: "time"}, {key: "overrun", title: "Measured / planned compute time", format: (v) => v === null ? MISSING : v.toFixed(3)}, {key: "predicted_bytes", title: "Predicted memory", axis: "bytes"}];
    for (const column of [...COLUMNS.filter((one) => !one.text && one.key !== "client"), ...more]) {
      const show = column.format ?? ((value) => quantity(value, column.axis));
      const median = this.run.medians[row.device]?.[column.key];
      figures.append(element("tr", {}, element("th", {scope: "row"}, column.title), element("td", {}, show(row[column.key] ?? null)),
        element("td", {}, median === undefined ? MISSING : show(median)), element("td", {}, this.against(row, column.key))));
    }
    for (const [name, means] of Object.entries(this.run.metrics)) {
      if (!Object.hasOwn(means, row.client)) continue;
      figures.append(element("tr", {}, element("th", {scope: "row"}, `${name}, mean of its tasks`), element("td", {}, String(means[row.client])), element("td", {}, MISSING), element("td", {}, MISSING)));
    }
    const charts = element("div", {class: "small"});
    const outcomes = this.payload.outcomes.filter((name) => row[name]).map((name) => `${row[name]} ${name}`).join(", ") || "no task";
    const heads = ["", "this client", `median of ${row.device}`, "ratio"].map((text) => element("th", {scope: "col"}, text));
    body.replaceChildren(
      element("h2", {}, `Client ${row.client}`),
      element("p", {}, `${row.device_title} (${row.device}) on ${row.link}, ${row.variant === null ? "unfit" : `trains ${row.variant}`} (${row.reason}).`),
      element("p", {class: "note"}, `${this.run.label}: ${outcomes}.`),
      swatches(this.payload.phases.map((phase) => [phase, `${phase} ${quantity(row[`${phase}_s`], "time")}`])), stack,
      element("div", {class: "scroll"}, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), figures)),
      element("h3", {}, "Over device time"), charts);
    if (!this.dialog.open) this.dialog.showModal();
    clientCharts(charts, this.run, this.payload, row.client);
    history.replaceState(null, "", `#client-${row.client}`);
  }

  openFromAddress() {
    const name = location.hash.match(/^#client-(.+)$/)?.[1];
    if (!name) return;
    const row = this.rows.find((one) => one.client === name);
    if (row) return this.page(row);
    this.dialog.querySelector("div").replaceChildren(element("h2", {}, "No such client"),
      element("p", {}, `There is no client ${name} in this run; its clients are ${this.rows[0]?.client} to ${this.rows.at(-1)?.client}.`));
    this.dialog.showModal();
  }
}
