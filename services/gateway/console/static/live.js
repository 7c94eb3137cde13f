// The live view: state and forecast of the schedulers, polled once a second while the view is visible.

import { get, request } from "./api.js";
import { Chart, roundUp, timeTicks } from "./chart.js";
import { count, element, seconds, share } from "./format.js";
import { History, HISTORY_S } from "./history.js";
import { find } from "./running.js";

const POLL_MS = 1000;
const PAST_S = 60; // in the first part of the page chart
const PAST_SHARE = 0.35;
const LEAST_FUTURE_S = 5;
const byId = (id) => document.getElementById(id);
const set = (id, text) => (byId(id).textContent = text);

export class Live {
  constructor(withKey) {
    this.withKey = withKey;
    this.history = new History();
    this.throughput = new Chart(byId("throughput"), { formatY: count });
    this.pages = new Chart(byId("pages"), { formatY: share });
    this.visible = false;
    this.timer = null;
    this.requestRows = new Rows(byId("requests"));
    this.replicaRows = new Rows(byId("replicas"));
    document.addEventListener("visibilitychange", () => this.wake());
  }

  shown(chosen) {
    this.visible = chosen;
    this.wake();
  }

  wake() {
    if (this.visible && !document.hidden && this.timer === null) this.poll();
  }

  async poll() {
    this.timer = 0; // a request is running
    try {
      const state = await this.withKey(() => get("console/state"));
      set("live-problem", "");
      this.history.add(state);
      this.render(state);
    } catch (error) {
      set("live-problem", error.status === 403 ? `Live figures are for operators: ${error.message}` : error.message);
      if (error.status === 403) return; // the same key would be rejected again
    }
    this.timer = setTimeout(() => {
      this.timer = null;
      this.wake();
    }, POLL_MS);
  }

  render(state) {
    const loads = state.replicas.map((replica) => replica.load).filter(Boolean);
    const sum = (name) => loads.reduce((total, load) => total + load[name], 0);
    const { history } = this;
    set("tile-running", count(sum("running_sequences")));
    set("tile-waiting", count(sum("waiting_sequences")));
    set("tile-out", count(history.recent("out", state.at)));
    set("tile-in", count(history.recent("in", state.at)));
    set("tile-pages", sum("total_pages") ? share(sum("in_use_pages") / sum("total_pages")) : "–");
    set("tile-reused", count(history.recent("reused", state.at)));
    set("tile-hydragen", share(history.hydragen ?? NaN));
    const ready = state.replicas.filter((replica) => replica.ready).length;
    set("status", `${ready} of ${state.replicas.length} ready${state.gateway.draining ? ", draining" : ""}`);
    byId("status").className = `status ${ready === state.replicas.length ? "good" : ready ? "fair" : "bad"}`;
    this.drawThroughput(state.at);
    this.drawPages(state);
    this.listRequests(state);
    this.listReplicas(state);
  }

  drawThroughput(now) {
    const { rates } = this.history;
    const line = (name, index) => ({
      points: rates.map((each) => [each.at - now, each[name]]),
      classes: `line-${index}`,
      area: index === 0,
    });
    this.throughput.draw({
      lines: [line("out", 0), line("in", 1)],
      scaleX: (x) => 1 + x / HISTORY_S,
      ticksX: [-90, -60, -30].map((x) => [x, `${x} s`]),
      mostY: roundUp(Math.max(10, ...rates.flatMap((each) => [each.out, each.in]))),
    });
  }

  drawPages(state) {
    const lines = [];
    let farthest = LEAST_FUTURE_S;
    let timed = true;
    for (const [index, replica] of state.replicas.entries()) {
      const past = (this.history.pages.get(replica.address) ?? []).map(([at, used]) => [at - state.at, used]);
      lines.push({ points: past.filter(([x]) => x >= -PAST_S), classes: `line-${index % 4} past`, area: true });
      const { curve, step_seconds: step } = replica.schedule ?? {};
      if (!curve?.total_pages) continue;
      timed &&= step !== null;
      const points = [];
      for (const [at, steps] of curve.steps.entries()) {
        const used = curve.pages[at] / curve.total_pages;
        if (at) points.push([steps * (step ?? 1), curve.pages[at - 1] / curve.total_pages]);
        points.push([steps * (step ?? 1), used]);
      }
      const last = points.at(-1)?.[0] ?? 0;
      farthest = Math.max(farthest, last);
      lines.push({ points, last, classes: `line-${index % 4} future` });
    }
    for (const line of lines) {
      if (line.last !== undefined && line.points.length) line.points.push([farthest, line.points.at(-1)[1]]);
    }
    const most = Math.max(...lines.flatMap((line) => line.points.map(([, used]) => used)));
    const mostY = Math.min(1, roundUp(Math.max(0.01, 1.15 * most)));
    const unit = (x) => (timed ? seconds(x) : `${x} steps`);
    this.pages.draw({
      lines,
      scaleX: (x) => (x < 0 ? PAST_SHARE * (1 + x / PAST_S) : PAST_SHARE + (1 - PAST_SHARE) * (x / farthest)),
      ticksX: [[-45, "-45 s"], [-15, "-15 s"], [0, "now"], ...timeTicks(farthest, 5, (x) => `+${unit(x)}`).slice(0, -1)],
      mostY,
      ceiling: mostY === 1 ? 1 : null,
      now: 0,
    });
    const names = state.replicas.length > 1 ? state.replicas.map((replica) => replica.address) : ["in use"];
    byId("pages-legend").replaceChildren(
      ...names.map((name, index) => element("span", `key line-${index % 4}`, name)),
      element("span", "", "before now: measured; after now: forecast, including the queue"),
    );
  }

  listRequests(state) {
    const rows = [];
    let unfinished = 0;
    for (const replica of state.replicas) {
      unfinished += replica.schedule?.unfinished_requests ?? 0;
      for (const request of replica.schedule?.requests ?? []) rows.push([`${replica.address} ${request.id}`, request]);
    }
    rows.sort(([, a], [, b]) => compareRequests(a, b));
    set("requests-count", unfinished > rows.length ? `${rows.length} of ${count(unfinished)}` : count(unfinished));
    this.requestRows.show(
      rows.map(([id, request]) => ({
        id,
        cells: [
          request.id, request.key || "–", stateOfSamples(request), count(request.prompt_tokens), generated(request),
          seconds(request.age_s), request.generated_tokens ? "–" : `in ${seconds(request.start_s)}`,
          `in ${seconds(request.finish_s)}`,
        ],
        fraction: request.generated_tokens / (request.max_tokens * Math.max(1, request.running + request.waiting)),
        cancel: (button) => this.cancel(request.id, button),
      })),
    );
  }

  // Stops a request of this page here, and any other request at its scheduler, with an error for its client.
  async cancel(id, button) {
    const own = find(id);
    if (own !== null) return own.abort();
    if (!confirm(`Cancel ${id}? Its client gets an error.`)) return;
    button.disabled = true;
    try {
      await this.withKey(() => request(`console/requests?id=${encodeURIComponent(id)}`, { method: "DELETE" }));
      set("cancel-problem", "");
    } catch (error) {
      set("cancel-problem", error.status === 404 ? "" : error.message); // 404: the request has ended
    }
    button.disabled = false;
  }

  listReplicas(state) {
    this.replicaRows.show(
      state.replicas.map((replica) => {
        const { load, plan, schedule } = replica;
        return {
          id: replica.address,
          cells: [
            replica.address, replica.model ?? "–", stateOf(replica),
            load ? `${count(load.running_sequences)} + ${count(load.waiting_sequences)} waiting` : "–",
            load ? `${count(load.in_use_pages)} + ${count(load.cached_pages)} cached of ${count(load.total_pages)}` : "–",
            seconds(schedule?.step_seconds), load ? count(load.plans_in_flight) : "–",
            plan && load?.running_sequences ? `${plan.hydragen_groups} (${count(plan.hydragen_rows)} rows)` : "–",
            load ? count(load.counters.preemptions) : "–", load ? count(load.counters.worker_restarts) : "–",
          ],
          state: replica.ready ? (replica.trouble ? "fair" : "good") : "bad",
        };
      }),
    );
  }
}

function stateOf({ ready, reason, trouble }) {
  if (!ready) return reason ?? "not ready";
  return trouble ? `ready, but its state is not available: ${trouble}` : "ready";
}

// Orders running requests before waiting ones, then by their expected end or start.
function compareRequests(a, b) {
  if (!a.running !== !b.running) return a.running ? -1 : 1;
  return a.running ? a.finish_s - b.finish_s : a.start_s - b.start_s;
}

function stateOfSamples({ running, waiting, finished }) {
  const all = running + waiting + finished;
  if (all === 1) return running ? "running" : "waiting";
  const parts = [[running, "running"], [waiting, "waiting"], [finished, "done"]].filter(([number]) => number);
  return parts.map(([number, what]) => `${count(number)} ${what}`).join(", ");
}

const generated = (request) => {
  const samples = request.running + request.waiting;
  return `${count(request.generated_tokens)} of ${samples > 1 ? `${count(samples)} × ` : ""}${count(request.max_tokens)}`;
};

// Rows of a table, which are updated in place to keep focus and hover.
class Rows {
  constructor(body) {
    this.body = body;
    this.rows = new Map();
  }

  show(wanted) {
    const ids = new Set(wanted.map((row) => row.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    for (const [index, given] of wanted.entries()) {
      let row = this.rows.get(given.id);
      if (row === undefined) this.rows.set(given.id, (row = makeRow(given)));
      update(row, given);
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
    }
  }
}

function makeRow({ cells, fraction, state }) {
  const row = element("tr");
  for (const [index] of cells.entries()) row.append(element(index ? "td" : "th"));
  row.firstChild.scope = "row";
  if (fraction !== undefined) {
    row.children[4].append(element("span"), element("progress"));
    row.append(element("td", "action"));
  }
  if (state !== undefined) row.children[2].append(element("span", "state"));
  return row;
}

function update(row, { cells, fraction, state, cancel }) {
  for (const [index, text] of cells.entries()) {
    const cell = row.children[index].firstElementChild ?? row.children[index];
    if (cell.textContent !== text) cell.textContent = text;
  }
  row.firstChild.title = cells[0];
  if (state !== undefined) {
    row.children[2].firstElementChild.className = `state ${state}`;
  }
  if (fraction === undefined) return;
  row.querySelector("progress").value = fraction;
  const action = row.lastElementChild;
  if (action.firstChild) return;
  const button = element("button", "danger small", "Cancel");
  button.ariaLabel = `Cancel ${cells[0]}`;
  button.onclick = () => cancel(button);
  action.append(button);
}
