// One run as it goes: its curves and numbers, asked for again every two seconds until it is finished.

import { Chart } from "/assets/chart.js";
import { ask, digits, duration, element, percent, showFault } from "/assets/common.js";

const name = new URLSearchParams(location.search).get("run") || "";
const chart = new Chart(document.getElementById("accuracy"));
const WORDS = { finished: "finished", running: "in progress", stopped: "stopped before its end" };
const byId = (id) => document.getElementById(id);

function cells(method, rounds) {
  const done = rounds ? `${method.rounds_done} of ${rounds}` : String(method.rounds_done);
  const bar = rounds ? element("progress", { max: rounds, value: method.rounds_done, "aria-label": `Rounds of ${method.label}` }) : "";
  const values = [
    element("span", {}, bar, ` ${done}`),
    percent(method.accuracy),
    method.epsilon_spent === null ? "–" : `${method.epsilon_spent}${method.server_trusted ? ", server trusted" : ""}`,
    digits(method.aggregate_variance),
    digits(method.aggregate_variance_predicted),
    digits(method.seconds_a_round, 2),
    method.finished || method.seconds_left === 0 ? "done" : duration(method.seconds_left),
  ];
  // On a phone every row is a block of names and values: each cell carries the name of its column.
  const names = [...byId("methods").tHead.rows[0].cells].slice(1).map((cell) => cell.textContent);
  return element("tr", {}, element("th", { scope: "row" }, method.label), ...values.map((value, place) => element("td", { "data-label": names[place] }, value)));
}

function showState(run) {
  const state = byId("state");
  const stopped = run.state === "stopped";
  const words = stopped ? `${WORDS.stopped}, silent for ${duration(run.silent_seconds)}` : WORDS[run.state];
  if (state.textContent !== words) state.textContent = words;
  state.className = `state ${run.state}`;
  byId("resume").hidden = !stopped;
  byId("resume").lastElementChild.textContent = run.resume;
}

function show(run) {
  document.title = `${run.name} – niss`;
  showState(run);
  document.getElementById("title").textContent = run.title;
  byId("settings").replaceChildren(
    ...Object.entries({ Folder: run.folder, ...run.settings }).map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value))),
  );
  byId("spent-words").textContent = run.target === null ? "" : `ε is what the worst-off client has spent so far, in the joint view; at most ${run.target} was promised.`;
  const report = document.getElementById("report");
  report.href = `/report?run=${encodeURIComponent(run.name)}`;
  report.hidden = false;
  document.getElementById("methods").tBodies[0].replaceChildren(...run.methods.map((one) => cells(one, run.rounds)));
  document.getElementById("notes").replaceChildren(...run.notes.map((note) => element("li", {}, note)));
  const values = run.methods.flatMap((one) => one.curve.map(([, accuracy]) => accuracy));
  const last = Math.max(1, run.rounds || 0, ...run.methods.map((one) => one.rounds_done));
  chart.show({
    label: `Test accuracy by round. ${run.methods.map((one) => `${one.label} ${percent(one.accuracy)}`).join(", ")}.`,
    x: { label: "Round", low: 0, high: last, format: (tick) => (Number.isInteger(tick) ? String(tick) : "") },
    y: { low: 0, high: Math.min(1, Math.ceil(10 * Math.max(0.1, ...values) + 0.2) / 10), format: (value) => `${Number((100 * value).toFixed(1))} %` },
    series: run.methods.map((one) => ({ name: one.unprotected ? `${one.label} (unprotected)` : one.label, points: one.curve, colour: one.colour, dash: one.dash })),
    head: (round) => `Round ${round}`,
    idle: values.length ? "Point at the chart to read its values." : "No round has been evaluated yet.",
  });
}

async function refresh() {
  let wait = 2000;
  if (!document.hidden) {
    try {
      const run = await ask(`/api/run?run=${encodeURIComponent(name)}`);
      showFault(null);
      show(run);
      if (run.state === "finished") return;
      if (run.state === "stopped") wait = 10000;
    } catch (fault) {
      showFault(fault);
      wait = 5000;
    }
  }
  setTimeout(refresh, wait);
}

refresh();
