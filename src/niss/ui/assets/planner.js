// The planner: asks the server for the plan of the current settings and shows it; only the latest answer counts.

import { Chart } from "/assets/chart.js";
import { ask, digits, element, showFault } from "/assets/common.js";
import { Control, SETTINGS } from "/assets/controls.js";

const PAUSE = 180;
const byId = (id) => document.getElementById(id);
const controls = Object.fromEntries(SETTINGS.map((setting) => [setting.name, new Control(setting, changed)]));
const curve = new Chart(byId("curve"));
const overRounds = new Chart(byId("rounds-chart"));
const dataField = byId("run-data");

let waiting = null;
let asked = null;
let ticking = null;
let runCommand = "";

function settings() {
  const given = {};
  for (const [name, control] of Object.entries(controls)) {
    const value = control.value;
    if (value === undefined) return null;
    if (value !== null) given[name] = value;
  }
  return given;
}

function changed(control, typed = false) {
  const participants = Number(controls.participants.field.value);
  const carry = controls.carry.toggle.checked;
  for (const one of Object.values(controls)) if (one.setting.only) one.box.hidden = (one.setting.only === "carry") !== carry;
  // Fixed cohorts are whole; a number that was typed is left as it is, and refused with the reason.
  if (carry && controls.pattern.choice.value === "cyclic" && control && !(typed && control === controls.clients)) controls.clients.snap(participants);
  if (participants > 2) controls.neighbours.limit(participants - 1, control !== controls.neighbours);
  const rounds = Number(controls.rounds.field.value);
  if (rounds >= 1) controls.participations.limit(rounds, control !== controls.participations);
  clearTimeout(waiting);
  waiting = setTimeout(plan, PAUSE);
}

async function plan() {
  const given = settings();
  if (given === null) {
    // Nothing to plan for, and nothing wrong either: a fault that was shown belongs to what has been cleared.
    const empty = Object.values(controls).find((control) => control.value === undefined);
    asked?.abort();
    asked = null;
    busy(false);
    showFault(null);
    byId("answer").classList.add("stale");
    byId("status").textContent = `${empty.setting.label}: give a number to go on.`;
    return;
  }
  const query = new URLSearchParams(given).toString();
  history.replaceState(null, "", `?${query}`);
  asked?.abort();
  const mine = new AbortController();
  asked = mine;
  busy(true);
  try {
    const answer = await ask(`/api/plan?${query}`, mine.signal);
    if (asked !== mine) return;
    showFault(null);
    show(answer);
    byId("answer").dataset.query = query;
  } catch (fault) {
    if (asked !== mine || fault.name === "AbortError") return;
    showFault(fault);
    byId("answer").classList.add("stale");
    byId("status").textContent = "";
  }
  busy(false);
}

function busy(on) {
  clearInterval(ticking);
  byId("result").setAttribute("aria-busy", String(on));
  if (!on) return;
  byId("answer").classList.add("stale");
  byId("status").textContent = "Planning …";
  const began = Date.now();
  // Announced once; the seconds only tell a patient reader that something is happening.
  ticking = setInterval(() => {
    const seconds = Math.round((Date.now() - began) / 1000);
    if (seconds >= 3) byId("status").textContent = `Planning … ${seconds} s`;
  }, 1000);
}

function show({ plan, printed, looks, command, python, run_command: run }) {
  byId("answer").hidden = false;
  byId("answer").classList.remove("stale");
  controls.kappa.suggest(plan.kappa);
  const kind = "noise_central" in plan ? "carry" : "round";
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = part.dataset.for !== kind;
  (kind === "carry" ? showCarried : showRound)(plan, printed, looks);
  showOutlook(plan.outlook);
  byId("runnable").hidden = run === null;
  byId("not-runnable").hidden = run !== null;
  runCommand = run ?? "";
  showRunCommand();
  byId("notes").replaceChildren(...plan.notes.map((note) => element("li", {}, note)));
  showCommand("command", command);
  byId("python").textContent = python;
  byId("json").textContent = JSON.stringify(plan, null, 2);
}

// The command with the data that was chosen, if it is not what a run has anyway.
function showRunCommand() {
  const { value, dataset } = dataField.selectedOptions[0];
  const data = dataField.selectedIndex ? ` --dataset ${value} --model ${dataset.model}` : "";
  showCommand("run-command", runCommand && runCommand + data);
}

// A line may end between two words of a command, but not within `--flag`.
function showCommand(id, text) {
  byId(id).replaceChildren(...text.split(" ").flatMap((word, place) => [place ? " " : "", element("span", { class: "word" }, word)]));
}

function showRound(plan, printed) {
  controls.neighbours.suggest(plan.neighbours);
  controls.participations.suggest(plan.plan.participations);
  headline(plan, printed);
  numbers(plan, roundRows(plan, printed));
  drawCurve(plan);
  drawRuler(plan);
  byId("status").textContent =
    `${digits(plan.aggregate_variance_ratio_to_central)} × the noise of a trusted server, ` +
    `${digits(plan.aggregate_variance_ratio_to_local)} × that of DP-FedAvg, at κ ${digits(plan.kappa)} and τ² ${digits(plan.tau2)}.`;
}

function showCarried(plan, printed, looks) {
  const best = plan.model_variance_ratio_to_best;
  for (const key of ["model_variance_ratio_to_central_mean", "model_variance_ratio_to_central_final", "model_variance_ratio_to_best"]) {
    put(key, plan[key] === null ? "–" : `${digits(plan[key])} ×`, plan[key]);
  }
  byId("best-words").textContent = best === null ? "the best correlated noise is not computed for so many rounds" : "the best correlated noise that a trusted server could use";
  numbers(plan, carriedRows(plan, printed));
  drawRounds(plan, looks);
  byId("status").textContent =
    `${digits(plan.model_variance_ratio_to_central_mean)} × the noise of a trusted server with fresh noise on average, ` +
    `${digits(plan.model_variance_ratio_to_central_final)} × in the final model, at κ ${digits(plan.kappa)} and ${digits(plan.carried_to_residual)} times as much carried as left.`;
}

const VERDICTS = { good: "yes", noisy: "with losses", hopeless: "hardly" };

// The noise itself, in units of what the updates can do: it moves with epsilon, clip and the size of the model.
function showOutlook(outlook) {
  const { verdict, ratio, bearable, clip, noise_norm: norm, parameters, rounds } = outlook;
  put("verdict", VERDICTS[verdict], ratio);
  byId("verdict-words").textContent = `over ${rounds} round${rounds === 1 ? "" : "s"} the noise is ${digits(ratio, 2)} × what the updates can do together`;
  put("noise_norm", digits(norm), norm);
  byId("norm-words").textContent = `is how far the noise of a round moves ${parameters.toLocaleString("en")} numbers; the updates move them by at most ${digits(clip)}, the clip`;
  put("deviation", digits(outlook.deviation), outlook.deviation);
  byId("outlook-help").textContent = verdict === "good" ? "A rule of thumb from digits, not a proof." : outlook.words.replace(/^.*What helps: /, "What helps: ");
  // From a hundredth of the line between yes and no to a hundred times it.
  const place = (value) => Math.min(1, Math.max(0, 0.5 + Math.log10(value / bearable) / 4));
  const bar = element("div", { class: "ruler-bar graded" });
  const dot = element("i");
  dot.style.left = `${(100 * place(ratio)).toFixed(1)}%`;
  for (const line of [bearable, 5 * bearable]) {
    const mark = element("s");
    mark.style.left = `${(100 * place(line)).toFixed(1)}%`;
    bar.append(mark);
  }
  bar.append(dot);
  const words = `Noise over what the updates can do, on a logarithmic scale: ${digits(ratio, 2)}. Up to ${digits(bearable, 2)} little is lost, from ${digits(5 * bearable, 2)} on hardly anything is learned.`;
  byId("outlook").replaceChildren(
    element("div", { role: "img", "aria-label": words }, bar),
    element("div", { class: "ruler-ends", "aria-hidden": "true" }, element("span", {}, "little noise"), element("span", {}, `${digits(bearable, 2)} to ${digits(5 * bearable, 2)}: with losses`), element("span", {}, "only noise")),
  );
}

function put(key, text, value) {
  for (const place of document.querySelectorAll(`[data-show="${key}"]`)) {
    place.textContent = text;
    place.dataset.value = String(value);
  }
}

function headline(plan, printed) {
  const local = plan.aggregate_variance_ratio_to_local;
  put("aggregate_variance_ratio_to_central", `${digits(plan.aggregate_variance_ratio_to_central)} ×`, plan.aggregate_variance_ratio_to_central);
  put("less_than_local", local < 1 ? `${digits(1 / local)} ×` : "no gain", local);
  byId("less-words").textContent = local < 1 ? "less than DP-FedAvg leaves" : "over DP-FedAvg";
  put("epsilon_joint", printed.epsilon_joint, plan.epsilon_joint);
}

function roundRows(plan, printed) {
  const colluders = plan.plan.colluders;
  return [
    ["epsilon_joint", "ε, joint view", printed.epsilon_joint, `over ${plan.plan.participations} participations, against a server that sees every upload${colluders ? ` and ${colluders} colluders` : ""}`],
    ["epsilon_marginal", "ε, marginal view", printed.epsilon_marginal, "one upload alone: what the paper counts"],
    ["neighbours", "Neighbours", digits(plan.neighbours, 4), `${plan.plan.graph} graph of ${plan.participants} participants`],
    ["kappa", "κ", digits(plan.kappa), "strength of the shares"],
    ["tau2", "τ²", digits(plan.tau2, 4), "distortion of received shares, calibrated anew for each round"],
    ["sigma", "σ of one client", digits(plan.sigma, 4), "noise a client would need alone, on its part of the average"],
    ["aggregate_variance_ratio_to_central", "Noise against a trusted server", `${digits(plan.aggregate_variance_ratio_to_central)} ×`, "variance in the sum"],
    ["aggregate_variance_ratio_to_local", "Noise against DP-FedAvg", `${digits(plan.aggregate_variance_ratio_to_local)} ×`, "variance in the sum"],
    ["aggregate_variance_ratio_ideal", "Ideal secure aggregation", `${digits(plan.aggregate_variance_ratio_ideal)} ×`, "what it would need, with distributed noise"],
    ["dropout_part", "Left by dropped clients", `${digits(plan.dropout_part)} ×`, "part of the noise that is not cancelled"],
    ["bytes", "Sent for the shares", "nothing", `derived from keys; ${plan.bytes_per_client["shares sent as seeds"]} bytes if sent as seeds`],
  ];
}

function carriedRows(plan, printed) {
  const { pattern, horizon, noise: { colluders, participants } } = plan.plan;
  const often = `${plan.participations} participation${plan.participations === 1 ? "" : "s"}`;
  const turns = pattern === "cyclic" ? `fixed cohorts of ${participants} take turns` : "nobody takes part again sooner";
  return [
    ["epsilon", "ε, joint view", printed.epsilon, `over all ${horizon} rounds, in at most ${often}, against a server that sees every upload of every round${colluders ? ` and ${colluders} colluders in each` : ""}`],
    ["separation", "Separation", digits(plan.separation), `rounds until a client comes back, ${pattern === "cyclic" ? "exactly" : "at least"}: ${turns}; who takes part is fixed ahead`],
    ["kappa", "κ", digits(plan.kappa), "strength of the shares within a round"],
    ["carried_to_residual", "Carried to residual", digits(plan.carried_to_residual), "noise that is taken out again, over noise that stays"],
    ["model_variance_ratio_to_central_mean", "Noise, mean over rounds", `${digits(plan.model_variance_ratio_to_central_mean)} ×`, "that of a trusted server with fresh noise in every round"],
    ["model_variance_ratio_to_central_final", "Noise, final model", `${digits(plan.model_variance_ratio_to_central_final)} ×`, "that of a trusted server with fresh noise in every round"],
    ["model_variance_ratio_to_best", "Noise against the best", plan.model_variance_ratio_to_best === null ? "–" : `${digits(plan.model_variance_ratio_to_best)} ×`, "the best correlated noise of a trusted server, mean"],
    ["rounds", "Committed rounds", digits(horizon, 4), "ending early is safe, going on is a new run"],
    ["participants", "Divide by", digits(participants, 4), "whoever arrives, at a rate fixed in advance"],
  ];
}

function numbers(plan, rows) {
  byId("numbers").replaceChildren(
    ...rows.map(([key, name, text, remark]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, element("b", { "data-key": key, "data-value": plan[key] }, text), " ", element("span", {}, remark))),
    ),
  );
}

function scale(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return { low: low / 1.3, high: high * 1.3, log: true };
}

function levels(plan) {
  const local = plan.aggregate_variance_ratio_to_central / plan.aggregate_variance_ratio_to_local;
  const found = [
    { name: "trusted server: 1", value: 1, below: true },
    { name: `DP-FedAvg: ${digits(local)}`, value: local },
  ];
  const ideal = plan.aggregate_variance_ratio_ideal;
  if (ideal > 1.25) found.push({ name: "ideal secure aggregation", value: ideal, below: true });
  return found;
}

function drawCurve(plan) {
  const chosen = plan.aggregate_variance_ratio_to_central;
  const lost = plan.dropout_part > 0;
  const line = (key) => plan.curve.map((point) => [point.kappa, point[key]]);
  const series = [{ name: "in all", points: line("total"), colour: "series-1" }];
  if (lost) {
    series.push({ name: "by design", points: line("residual"), colour: "series-2" });
    series.push({ name: "left by dropouts", points: line("dropout"), colour: "series-3" });
  }
  const marks = levels(plan);
  const y = scale([...marks.map((one) => one.value), chosen, 0.8, ...series[0].points.map((point) => point[1])]);
  const visible = (points) => points.filter(([, value]) => value >= y.low && value <= y.high);
  for (const one of series) one.points = visible(one.points);
  curve.show({
    label: `Noise in the sum over the strength of the shares, trusted server = 1. The plan: ${digits(chosen)} at kappa ${digits(plan.kappa)}.`,
    x: { label: "Strength of the shares, κ", low: Math.min(0.25, plan.kappa), high: Math.max(100, plan.kappa), log: true, format: digits },
    y: { ...y, format: digits },
    series,
    levels: marks,
    mark: { x: plan.kappa, y: chosen, name: `the plan: ${digits(chosen)} at κ ${digits(plan.kappa)}` },
    head: (kappa) => `κ ${digits(kappa)}`,
    idle: "Noise variance in the sum, in units of what a trusted server adds.",
  });
  byId("curve-table").tBodies[0].replaceChildren(
    ...plan.curve.filter((_, place) => place % 4 === 0).map((point) =>
      element("tr", {}, element("th", { scope: "row" }, digits(point.kappa)), ...["residual", "dropout", "total"].map((key) => element("td", {}, digits(point[key])))),
    ),
  );
}

function drawRounds(plan, looks) {
  const final = plan.noise_central[plan.noise_central.length - 1];
  const curves = [
    ["noise", "carried shares, nobody trusted"],
    ["noise_central", "trusted server, fresh noise"],
    ["noise_banded", "trusted server, BandMF"],
    ["noise_best", "trusted server, best correlated noise"],
  ];
  const series = curves.filter(([key]) => plan[key] !== null).map(([key, name]) => ({
    name, ...(looks[key] ?? { colour: "ink", dash: 2 }), points: plan[key].map((value, place) => [place + 1, value / final]),
  }));
  const high = Math.max(...series.flatMap((one) => one.points.map((point) => point[1])));
  overRounds.show({
    label: `Noise in the model over ${plan.noise.length} rounds, beside trusted servers. Carried shares leave ${digits(plan.model_variance_ratio_to_central_mean)} times the noise of a trusted server with fresh noise on average.`,
    x: { label: "Round", low: 1, high: Math.max(plan.noise.length, 2), format: digits },
    y: { low: 0, high: 1.05 * high, format: digits },
    series,
    head: (round) => `round ${round}`,
    idle: "Noise variance in the model; what a trusted server with fresh noise leaves at the end is 1.",
  });
  const tenths = [...new Set(Array.from({ length: 10 }, (_, part) => Math.max(1, Math.round(((part + 1) * plan.noise.length) / 10))))];
  byId("rounds-table").tBodies[0].replaceChildren(
    ...tenths.map((round) =>
      element("tr", {}, element("th", { scope: "row" }, String(round)), ...curves.map(([key]) => element("td", {}, plan[key] === null ? "–" : digits(plan[key][round - 1] / final)))),
    ),
  );
}

// Where the plan lies between the trusted server and DP-FedAvg, on a logarithmic line.
function drawRuler(plan) {
  const chosen = plan.aggregate_variance_ratio_to_central;
  const local = chosen / plan.aggregate_variance_ratio_to_local;
  const share = Math.log(chosen) / Math.log(Math.max(local, 1.0001));
  const place = Math.min(1, Math.max(0, share));
  const bar = element("div", { class: "ruler-bar" });
  const dot = element("i");
  dot.style.left = `${(100 * place).toFixed(2)}%`;
  bar.append(dot);
  const words = `On a logarithmic scale from a trusted server (1) to DP-FedAvg (${digits(local)}) the plan lies at ${digits(chosen)}.`;
  const picture = element("div", { role: "img", "aria-label": words }, bar);
  byId("ruler").replaceChildren(
    picture,
    element("div", { class: "ruler-ends", "aria-hidden": "true" }, element("span", {}, "trusted server: 1"), element("span", {}, "log scale"), element("span", {}, `DP-FedAvg: ${digits(local)}`)),
  );
}

function start(values) {
  for (const [name, control] of Object.entries(controls)) {
    const setting = control.setting;
    if (values.has(name)) control.set(values.get(name));
    else control.set(setting.auto ? null : setting.start);
  }
  changed();
}

for (const button of document.querySelectorAll("[data-copy]")) {
  const words = button.firstChild;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(byId(button.dataset.copy).textContent);
      words.textContent = "Copied";
    } catch {
      words.textContent = "Select and copy";
      getSelection().selectAllChildren(byId(button.dataset.copy));
    }
    setTimeout(() => (words.textContent = "Copy"), 2000);
  });
}
dataField.addEventListener("change", showRunCommand);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("reset").addEventListener("click", () => start(new URLSearchParams()));
start(new URLSearchParams(location.search));
