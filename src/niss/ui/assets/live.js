// One run as it goes: its curves and numbers, asked for again every two seconds until it is finished.

import { Chart } from "/assets/chart.js";
import { ask, digits, duration, element, percent, showFault } from "/assets/common.js";

const name = new URLSearchParams(location.search).get("run") || "";
const chart = new Chart(document.getElementById("accuracy"));
const WORDS = { finished: "finished", running: "in progress", stopped: "stopped before its end" };

function cells(method, rounds) {
  const done = rounds ? `${method.rounds_done} of ${rounds}` : String(method.rounds_done);
  const bar = rounds ? element("progress", { max: rounds, value: method.rounds_done, "aria-label": `Rounds of ${method.label}` }) : "";
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, method.label),
    element("td", {}, bar, ` ${done}`),
    element("td", {}, percent(method.accuracy)),
    element("td", {}, digits(method.aggregate_variance)),
    element("td", {}, digits(method.aggregate_variance_predicted)),
    element("td", {}, digits(method.seconds_a_round, 2)),
    element("td", {}, method.finished || method.seconds_left === 0 ? "done" : duration(method.seconds_left)),
  );
}

function show(run) {
  document.title = `${run.name} – niss`;
  document.getElementById("title").textContent = run.title;
  const state = document.getElementById("state");
  const words = run.state === "stopped" ? `${WORDS.stopped}, silent for ${duration(run.silent_seconds)}` : WORDS[run.state];
  if (state.textContent !== words) state.textContent = words;
  state.className = `state ${run.state}`;
  const report = document.getElementById("report");
  report.href = `/report?run=${encodeURIComponent(run.name)}`;
  report.hidden = false;
  document.getElementById("methods").tBodies[0].replaceChildren(...run.methods.map((one) => cells(one, run.rounds)));
  document.getElementById("notes").replaceChildren(...run.notes.map((note) => element("li", {}, note)));
  const values = run.methods.flatMap((one) => one.curve.map(([, accuracy]) => accuracy));
  const last = Math.max(1, run.rounds || 0, ...run.methods.map((one) => one.rounds_done));
  let used = 0;
  chart.show({
    label: `Test accuracy by round. ${run.methods.map((one) => `${one.label} ${percent(one.accuracy)}`).join(", ")}.`,
    x: { label: "Round", low: 0, high: last, format: (tick) => (Number.isInteger(tick) ? String(tick) : "") },
    y: { low: 0, high: Math.min(1, Math.ceil(10 * Math.max(0.1, ...values) + 0.2) / 10), format: (value) => `${Number((100 * value).toFixed(1))} %` },
    series: run.methods.map((one) => ({ name: one.label, points: one.curve, colour: one.private ? `series-${(used++ % 10) + 1}` : "ink" })),
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
