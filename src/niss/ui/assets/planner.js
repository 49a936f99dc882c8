// The planner: asks the server for the plan of the current settings and shows it; only the latest answer counts.

import { ask, byId, readCharts, showFault } from "/assets/common.js";

const PAUSE = 180;
const STEPS = 1000;
const dataField = byId("run-data");
const unit = byId("controls").elements.unit.value;
// What means the same whatever is hidden.
const KEPT = ["epsilon", "delta", "collusion"];

let waiting = null;
let asked = null;
let ticking = null;
let runCommand = "";

// A number as the whole page writes it.
const written = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential() : String(value));

// A setting of the form: a switch, a choice, or a slider for a quick look and a field for an exact value, both always the same.
class Control {
  constructor(box) {
    this.box = box;
    this.field = box.querySelector("[name]");
    this.name = this.field.name;
    this.range = byId(`${this.field.id}-range`);
    this.auto = byId(`${this.field.id}-auto`);
    this.start = this.field.dataset.start;
    this.field.addEventListener(this.range ? "input" : "change", () => {
      if (this.range) this.slide();
      changed(this, true);
    });
    if (!this.range) return;
    const { low, high, figures } = this.range.dataset;
    [this.low, this.high, this.figures] = [Number(low), Number(high), Number(figures)];
    this.whole = this.field.step === "1";
    this.range.addEventListener("input", () => this.move());
    this.auto?.addEventListener("change", () => {
      this.set(this.auto.checked ? null : this.remembered ?? this.start);
      changed(this);
    });
  }

  // The value as it is sent: null means the planner's choice, undefined that there is none.
  get value() {
    if (this.box.hidden || this.auto?.checked) return null;
    if (this.field.type === "checkbox") return this.field.checked ? "true" : null;
    return this.field.value === "" ? undefined : this.field.value;
  }

  set(value) {
    if (this.field.type === "checkbox") this.field.checked = value === "true";
    if (this.auto) this.auto.checked = this.range.disabled = this.field.disabled = value === null;
    if (this.field.type === "checkbox" || value === null) return;
    this.field.value = value;
    if (this.field.selectedIndex === -1) this.field.value = this.start;
    if (this.range) this.slide();
  }

  reset(values) {
    this.set(values.get(this.name) ?? (this.auto ? null : this.start));
  }

  // What the planner chose, shown in the greyed field.
  suggest(value) {
    this.remembered = this.whole ? Math.round(value) : Number(value.toPrecision(this.figures));
    if (this.auto.checked) this.put(Number(value.toPrecision(this.whole ? 12 : 3)));
  }

  // Of a value that was given for a larger round, as much as fits; one that is being typed is left, and refused with the reason.
  limit(high, lower) {
    this.high = Math.max(high, this.low + 1);
    if (lower && !this.auto.checked && Number(this.field.value) > high) this.put(high);
    this.slide();
  }

  put(value) {
    this.field.value = written(value);
    this.slide();
  }

  move() {
    const share = this.range.value / STEPS;
    let value = this.low > 0 ? this.low * (this.high / this.low) ** share : Math.round(100 * this.high * share) / 100;
    value = share === 1 ? this.high : Number(value.toPrecision(this.figures));
    this.field.value = written(this.whole ? Math.round(value) : value);
    this.range.setAttribute("aria-valuetext", this.field.value);
    changed(this);
  }

  slide() {
    const inside = Math.min(this.high, Math.max(this.low, Number(this.field.value) || this.low));
    const share = this.low > 0 ? Math.log(inside / this.low) / Math.log(this.high / this.low) : inside / this.high;
    this.range.value = Math.round(share * STEPS);
    this.range.setAttribute("aria-valuetext", this.field.value);
  }
}

const list = [...document.querySelectorAll(".control")].map((box) => new Control(box));
const controls = Object.fromEntries(list.map((control) => [control.name, control]));

function changed(control, typed = false) {
  const { participants: size, clients: all, carry, pattern, neighbours } = controls;
  const shown = carry?.field.checked ? "carry" : "round";
  for (const one of list) if (one.box.dataset.only) one.box.hidden = one.box.dataset.only !== shown;
  const participants = Number(size.field.value);
  // Enough for a round, and whole cohorts where they are fixed; a number that was typed is left as it is, and refused with the reason.
  if (all && control && !(typed && control === all) && participants > 0) {
    const [clients, fixed] = [Number(all.field.value), shown === "carry" && pattern.value === "cyclic"];
    const wanted = fixed ? Math.round(clients / participants) * participants : clients;
    if (wanted !== clients || wanted < participants) all.put(Math.max(wanted, participants));
  }
  if (participants > 2) neighbours.limit(participants - 1, control !== neighbours);
  clearTimeout(waiting);
  waiting = setTimeout(plan, PAUSE);
}

async function plan() {
  asked?.abort();
  const empty = list.find((control) => control.value === undefined);
  if (empty) {
    // Nothing to plan for, and nothing wrong either: a fault that was shown belongs to what has been cleared.
    asked = null;
    busy(false);
    showFault(null);
    byId("answer").classList.add("stale");
    byId("status").textContent = `${empty.field.labels[0].textContent}: give a number to go on.`;
    return;
  }
  const given = list.filter((control) => control.value !== null).map((control) => [control.name, control.value]);
  const query = new URLSearchParams([["unit", unit], ...given]).toString();
  history.replaceState(null, "", `?${query}`);
  for (const link of document.querySelectorAll("[data-unit]")) {
    link.search = new URLSearchParams([["unit", link.dataset.unit], ...given.filter(([name]) => KEPT.includes(name))]);
  }
  const mine = (asked = new AbortController());
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

function show({ plan, html, command, python, run_command: run }) {
  const open = byId("as-table")?.open ?? false;
  byId("plan").innerHTML = html;
  byId("as-table").open = open;
  byId("answer").hidden = false;
  byId("answer").classList.remove("stale");
  byId("status").textContent = byId("status-words").textContent;
  controls.kappa.suggest(plan.plan.kappa);
  if (!plan.carry) controls.neighbours.suggest(plan.plan.neighbours);
  byId("runnable").hidden = run === null;
  byId("not-runnable").hidden = run !== null;
  runCommand = run ?? "";
  showRunCommand();
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
  const words = text.split(" ").map((word) => Object.assign(document.createElement("span"), { className: "word", textContent: word }));
  byId(id).replaceChildren(...words.flatMap((word, place) => [place ? " " : "", word]));
}

function start(values) {
  for (const control of list) control.reset(values);
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
readCharts();
dataField.addEventListener("change", showRunCommand);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("reset").addEventListener("click", () => start(new URLSearchParams()));
start(new URLSearchParams(location.search));
