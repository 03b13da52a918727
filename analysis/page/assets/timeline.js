/* Rounds as stacked bars, and the timeline of tasks. Each phase is a single path, so that many tasks draw quickly. */
"use strict";

const PHASE_NAMES = {
  download: "download", compute: "compute", upload: "upload", server: "server",
  rest: "waiting for a deadline or a failed client",
};

function swatches(names) {
  const list = element("ul", {class: "legend"});
  for (const [colour, text] of names) list.append(element("li", {}, element("i", {style: `background: var(--${colour})`}), text));
  return list;
}

/* One bar per merge, by phase of the client that finished last; a click opens that round below. */
function roundChart(box, run, payload, open) {
  const rounds = run.rounds;
  const count = rounds.number.length;
  box.replaceChildren();
  if (!count) {
    box.append(element("p", {class: "note"}, "No round has ended yet."));
    return;
  }
  const totals = rounds.number.map((_, i) => payload.path.reduce((sum, name) => sum + rounds.path[name][i], 0));
  const highest = Math.max(...totals);
  const [size, unit] = scale(highest, "time");
  const height = 240;
  const chart = element("div", {class: "chart"});
  const shown = payload.path.filter((name) => rounds.path[name].some((value) => value > highest / 1000));
  box.append(swatches(shown.map((name) => [name, PHASE_NAMES[name]])), chart);
  redrawOnResize(chart, (width) => {
    const pad = {left: 42, right: 8, top: 8, bottom: 38};
    const step = (width - pad.left - pad.right) / count;
    const thick = Math.max(0.8, Math.min(28, step * 0.8));
    const y = (value) => height - pad.bottom - (value / highest) * (height - pad.top - pad.bottom);
    const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Duration of each round by phase of its last client"});
    for (const value of ticks(0, highest / size, 4)) {
      root.append(svg("path", {class: "grid", d: `M${pad.left} ${y(value * size)}H${width - pad.right}`}));
      root.append(svg("text", {x: pad.left - 8, y: y(value * size) + 4, "text-anchor": "end"}, tickText(value)));
    }
    const base = new Array(count).fill(0);
    for (const name of shown) {
      let path = "";
      for (let i = 0; i < count; i += 1) {
        const value = rounds.path[name][i];
        const left = pad.left + (i + 0.5) * step - thick / 2;
        if (value > 0) path += `M${left.toFixed(1)} ${y(base[i]).toFixed(1)}h${thick.toFixed(2)}V${y(base[i] + value).toFixed(1)}h${(-thick).toFixed(2)}z`;
        base[i] += value;
      }
      root.append(svg("path", {d: path, fill: `var(--${name})`}));
    }
    for (const value of ticks(1, count, width / 80)) {
      if (!Number.isInteger(value) || value < 1) continue;
      root.append(svg("text", {x: pad.left + (value - 0.5) * step, y: height - pad.bottom + 16, "text-anchor": "middle"}, String(run.in_rounds ? rounds.number[value - 1] : value)));
    }
    root.append(svg("path", {class: "axis", d: `M${pad.left} ${height - pad.bottom}H${width - pad.right}`}));
    root.append(svg("text", {x: (pad.left + width) / 2, y: height - 4, "text-anchor": "middle"}, `${run.in_rounds ? "Round" : "Merge"}; height in device time (${unit})`));
    const tip = element("div", {class: "tip", hidden: ""});
    const placeOf = (event) => Math.floor(((event.clientX - root.getBoundingClientRect().left) - pad.left) / step);
    root.addEventListener("pointerleave", () => { tip.hidden = true; });
    root.addEventListener("pointermove", (event) => {
      const i = placeOf(event);
      if (i < 0 || i >= count) return;
      const last = rounds.last[i] === null ? "no result counted" : `last: client ${clientName(run, payload, rounds.last[i])}`;
      const without = rounds.without[i] === null ? null : element("div", {}, `${quantity(rounds.without[i], "time")} without it`);
      tip.replaceChildren(element("b", {}, `round ${rounds.number[i]}: ${quantity(rounds.duration[i], "time")}`), element("div", {}, last), ...(without ? [without] : []));
      tip.hidden = false;
      const at = pad.left + (i + 1) * step + 8;
      tip.style.transform = `translate(${at + tip.offsetWidth > width ? at - step - tip.offsetWidth - 16 : at}px, 8px)`;
    });
    root.addEventListener("click", (event) => {
      const i = placeOf(event);
      if (i >= 0 && i < count) open(rounds.number[i]);
    });
    root.style.cursor = "pointer";
    chart.replaceChildren(root, tip);
  });
}

function clientName(run, payload, client) {
  const row = run.clients.find((one) => Number(one[0]) === client);
  return row ? `${row[0]} (${row[payload.columns.indexOf("device")]})` : String(client);
}

/* The Gantt chart of one round or the whole run, with a window of device time that can be moved and zoomed. */
class Timeline {
  constructor(root) {
    this.box = root.querySelector("#timeline");
    this.round = root.querySelector("#round");
    this.total = root.querySelector("#round-total");
    this.output = root.querySelector("#window");
    this.box.before(swatches([
      ["download", "download"], ["compute", "compute"], ["upload", "upload"], ["lost", "wasted"],
    ]));
    const actions = {
      "round-before": () => this.open(this.place - 1), "round-after": () => this.open(this.place + 1),
      "whole-run": () => this.openAll(), "zoom-in": () => this.zoom(0.5), "zoom-out": () => this.zoom(2), "zoom-reset": () => this.reset(),
    };
    for (const [id, act] of Object.entries(actions)) root.querySelector(`#${id}`).addEventListener("click", act);
    this.round.addEventListener("change", () => this.openRound(Number(this.round.value)));
    const keys = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.reset(),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "[": () => this.open(this.place - 1), "]": () => this.open(this.place + 1),
    };
    this.box.addEventListener("keydown", (event) => {
      if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        keys[event.key]();
      }
    });
    this.box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event));
    }, {passive: false});
    this.box.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event)));
    this.drag();
    redrawOnResize(this.box, () => this.run && this.draw());
  }

  /* Another run is opened at its first round; newer data of the same run leave the window where it is. */
  show(run, payload) {
    const again = this.run?.label === run.label && this.windows.length > 0;
    this.run = run;
    this.payload = payload;
    this.tasks = run.tasks ? unpack(run.tasks, payload.phases) : [];
    this.windows = windows(run.rounds);
    this.total.textContent = this.windows.length ? `of ${this.windows.at(-1).number}` : "";
    this.round.max = this.windows.at(-1)?.number ?? 1;
    if (again) this.draw();
    else this.open(0);
  }

  openRound(number) {
    const place = this.windows.findIndex((one) => one.number === number);
    this.open(place < 0 ? this.place : place);
  }

  open(place) {
    this.place = Math.max(0, Math.min(this.windows.length - 1, place));
    if (!this.windows.length) return this.openAll();
    const {number, start, end} = this.windows[this.place];
    this.round.value = number;
    const near = 2e-3 + (this.run.tasks?.tick_s ?? 0); // rounded times must not fall into the next round
    const active = this.tasks.filter((task) => task.start < end - near && task.end > start
      && (!this.run.in_rounds || task.start > start - near));
    const last = this.run.in_rounds ? Math.max(end, ...active.map((task) => task.end)) : end;
    active.sort((a, b) => b.end - a.end);
    this.setRows([...new Set(active.map((task) => task.client))], start, last);
  }

  openAll() {
    const end = Math.max(0, ...this.tasks.map((task) => task.end));
    this.setRows([...new Set(this.tasks.map((task) => task.client))].sort((a, b) => a - b), 0, end);
  }

  setRows(rows, from, to) {
    this.rows = new Map(rows.map((client, place) => [client, place]));
    this.full = [from, Math.max(to, from + 1e-3)];
    this.reset();
  }

  reset() { [this.from, this.to] = this.full; this.draw(); }

  zoom(factor, around = (this.from + this.to) / 2) {
    const least = (this.full[1] - this.full[0]) / 5000;
    const length = Math.min(this.full[1] - this.full[0], Math.max(least, (this.to - this.from) * factor));
    const share = (around - this.from) / (this.to - this.from);
    this.place_window(around - share * length, length);
  }

  pan(share) { this.place_window(this.from + share * (this.to - this.from), this.to - this.from); }

  place_window(from, length) {
    this.from = Math.min(Math.max(from, this.full[0]), this.full[1] - length);
    this.to = this.from + length;
    this.draw();
  }

  timeAt(event) {
    const bounds = this.box.getBoundingClientRect();
    const share = (event.clientX - bounds.left - this.pad) / (bounds.width - this.pad);
    return this.from + Math.min(1, Math.max(0, share)) * (this.to - this.from);
  }

  drag() {
    let last = null;
    this.box.addEventListener("pointerdown", (event) => { last = event.clientX; this.box.setPointerCapture(event.pointerId); });
    this.box.addEventListener("pointerup", () => { last = null; });
    this.box.addEventListener("pointermove", (event) => {
      if (last !== null && event.buttons) {
        this.pan((last - event.clientX) / (this.box.clientWidth - this.pad));
        last = event.clientX;
      }
      this.showTip(event);
    });
    this.box.addEventListener("pointerleave", () => { if (this.tip) this.tip.hidden = true; });
  }

  draw() {
    const width = this.box.clientWidth;
    this.output.textContent = `showing ${quantity(this.from, "time")} to ${quantity(this.to, "time")}`;
    Object.assign(this.box.dataset, {from: this.from, to: this.to, rows: this.rows.size});
    if (!width) return;
    if (!this.run.tasks) {
      this.box.replaceChildren(element("p", {class: "note"}, "The timeline of this run is omitted to keep the page small; write a report of its folder alone to see it."));
      return;
    }
    const rows = this.rows.size;
    const thick = Math.max(5, Math.min(18, Math.floor(560 / Math.max(1, rows))));
    const names = [...this.rows.keys()].map((client) => clientName(this.run, this.payload, client));
    this.pad = width < 560 ? 40 : Math.min(210, 16 + 6.2 * Math.max(4, ...names.map((name) => name.length)));
    const height = rows * thick + 30;
    const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Timeline of ${rows} clients`});
    const x = (time) => this.pad + ((time - this.from) / (this.to - this.from)) * (width - this.pad);
    const [size, unit] = scale(this.to, "time");
    for (const value of ticks(this.from / size, this.to / size, width / 110)) {
      root.append(svg("path", {class: "grid", d: `M${x(value * size)} 0V${height - 24}`}));
      if (x(value * size) < width - 30) root.append(svg("text", {x: x(value * size), y: height - 8, "text-anchor": "middle"}, `${tickText(value)} ${unit}`));
    }
    this.bars(root, x, thick, width);
    const every = Math.ceil(11 / thick);
    names.forEach((name, place) => {
      if (place % every) return;
      const text = width < 560 ? name.split(" ")[0] : shortened(name, 32);
      root.append(svg("text", {class: "row-label", x: this.pad - 8, y: place * thick + thick / 2 + 4, "text-anchor": "end"}, text));
    });
    this.tip = element("div", {class: "tip", hidden: ""});
    this.box.replaceChildren(root, this.tip);
    this.thick = thick;
  }

  bars(root, x, thick, width) {
    const paths = {download: "", compute: "", upload: "", lost: ""};
    const bar = Math.max(3, thick - 3);
    for (const task of this.tasks) {
      const row = this.rows.get(task.client);
      if (row === undefined || task.end < this.from || task.start > this.to) continue;
      const top = row * thick + (thick - bar) / 2;
      let at = task.start;
      for (const phase of this.payload.phases) {
        const left = Math.max(this.pad, x(at));
        const right = Math.min(width, x(at + task[phase]));
        if (right > left) paths[phase] += `M${left.toFixed(1)} ${top}h${Math.max(0.5, right - left).toFixed(1)}v${bar}H${left.toFixed(1)}z`;
        at += task[phase];
      }
      if (!task.merged) {
        const left = Math.max(this.pad, x(task.start));
        const right = Math.max(left + 3, Math.min(width, x(task.end)));
        paths.lost += `M${left.toFixed(1)} ${top + bar - 2}H${right.toFixed(1)}v2H${left.toFixed(1)}z`;
        if (x(task.end) >= this.pad && x(task.end) <= width) paths.lost += `M${(x(task.end) - 1.5).toFixed(1)} ${top}h3v${bar}h-3z`;
      }
    }
    for (const [name, d] of Object.entries(paths)) if (d) root.append(svg("path", {d, fill: `var(--${name})`}));
  }

  showTip(event) {
    if (!this.tip || !this.run.tasks) return;
    const bounds = this.box.getBoundingClientRect();
    const row = Math.floor((event.clientY - bounds.top) / this.thick);
    const time = this.timeAt(event);
    const task = this.tasks.find((one) => this.rows.get(one.client) === row && one.start <= time && time <= one.end);
    this.tip.hidden = !task;
    if (!task) return;
    const phases = this.payload.phases.filter((phase) => task[phase] > 0).map((phase) => `${phase} ${quantity(task[phase], "time")}`);
    const outcome = this.payload.outcomes[task.outcome] + (task.merged ? "" : ", not merged");
    this.tip.replaceChildren(element("b", {}, `client ${clientName(this.run, this.payload, task.client)}`), element("div", {}, outcome), ...phases.map((text) => element("div", {}, text)));
    const left = event.clientX - bounds.left;
    const shift = left + 14 + this.tip.offsetWidth > bounds.width ? -this.tip.offsetWidth - 14 : 14;
    this.tip.style.transform = `translate(${Math.max(0, left + shift)}px, ${event.clientY - bounds.top + 14}px)`;
  }
}

/* Start and end of each round: a round with several stages, or without a common end, has several merges. */
function windows(rounds) {
  const found = new Map();
  rounds.number.forEach((number, i) => {
    const end = rounds.start[i] + rounds.duration[i];
    const one = found.get(number) ?? {number, start: rounds.start[i], end};
    found.set(number, {number, start: Math.min(one.start, rounds.start[i]), end: Math.max(one.end, end)});
  });
  return [...found.values()];
}

function shortened(text, most) { return text.length > most ? text.slice(0, most - 1) + "…" : text; }

/* Converts columns of whole ticks back into tasks in device seconds. */
function unpack(columns, phases) {
  let ticks = 0;
  return columns.client.map((client, i) => {
    ticks += columns.start[i];
    const task = {client, start: ticks * columns.tick_s, outcome: columns.outcome[i], merged: columns.merged[i]};
    let length = 0;
    for (const phase of phases) {
      task[phase] = columns[phase][i] * columns.tick_s;
      length += task[phase];
    }
    task.end = task.start + length;
    return task;
  });
}
