/* A page that asks its own server for newer data, shows what runs are doing now, and says when nobody answers any more. */
"use strict";

const EVERY_MS = 1500;

/* One card per run, side by side. */
function card(run) {
  const busy = Object.entries(run.doing ?? {}).filter(([, count]) => count).map(([what, count]) => `${count} ${what}`).join(", ");
  const times = [];
  if (run.device_s !== undefined) times.push(`${quantity(run.device_s, "time")} of device time`);
  if (run.host_s !== undefined) times.push(`${quantity(run.host_s, "time")} on this host`);
  if (run.left_s) times.push(`about ${quantity(run.left_s, "time")} left`);
  const share = run.rounds ? run.round / run.rounds : 0;
  const kind = run.state === "running" || run.state === "done" ? run.state : run.ended === false || run.state === "not started" || run.state === "starting" ? "other" : "stopped";
  return element("article", {class: `card ${kind}`, "data-run": run.name},
    element("h3", {}, run.name),
    element("p", {class: "state"}, run.rounds ? `${run.state}, round ${run.round} of ${run.rounds}` : run.state),
    meterOf(share),
    element("p", {class: "note"}, times.join(", ")),
    element("p", {class: "note"}, busy || (run.state === "running" ? run.said : "") || ""));
}

function showNow(runs) {
  document.querySelector("#cards").replaceChildren(...runs.map(card));
  const busy = runs.filter((run) => run.tasks?.length);
  // those that a round waits for longest come first
  const rows = busy.flatMap((run) => run.tasks.sort((a, b) => b.at(-1) - a.at(-1)).map(([client, device, variant, doing, since, end]) =>
    [busy.length > 1 ? `${run.name}: ${client}` : client, device, variant, doing, quantity(since, "time"), quantity(end, "time")]));
  document.querySelector("#doing").hidden = !rows.length;
  document.querySelector("#doing-table").replaceChildren(table(["Client", "Device", "Variant", "Doing", "Since", "Planned end"], rows, {text: [1, 2, 3]}));
  const notices = runs.flatMap((run) => (run.notices ?? []).map(([at, text]) => element("li", {}, `${run.name}, ${quantity(at, "time")}: ${text}`)));
  document.querySelector("#log").hidden = !notices.length;
  document.querySelector("#log summary").textContent = `${notices.length} notices`;
  document.querySelector("#log-list").replaceChildren(...notices.reverse());
}

class LivePage {
  constructor() {
    this.page = null;
    this.take(JSON.parse(document.querySelector("#payload").textContent));
    this.page?.clients.openFromAddress();
    setTimeout(() => this.ask(), EVERY_MS);
  }

  take(state) {
    this.stamp = state.stamp;
    showNow(state.now);
    for (const [name, html] of Object.entries(state.parts ?? {})) {
      const part = document.querySelector(`[data-part="${name}"]`);
      if (part.innerHTML !== html) part.innerHTML = html; // escaped where it was written
    }
    document.querySelector("main").hidden = !this.page && !state.payload;
    if (state.payload) {
      this.page ??= new Page();
      this.page.show(state.payload);
    }
    const over = state.now.length > 0 && state.now.every((run) => run.ended);
    this.say(over ? "Every run has ended." : `Updated at ${new Date().toLocaleTimeString()}.`);
  }

  say(text) { document.querySelector("#connection").textContent = text; }

  async ask() {
    const answer = await fetch(`state?known=${this.stamp}`, {cache: "no-store"}).catch(() => null);
    if (!answer?.ok) {
      this.say("Nobody answers any more: fleetbed watch has ended. This page shows its last state.");
      document.querySelector("#connection").classList.add("banner");
      return;
    }
    this.take(await answer.json());
    setTimeout(() => this.ask(), EVERY_MS);
  }
}
const live = new LivePage();
