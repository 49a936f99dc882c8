// The planner's settings: each a slider for a quick look and a field for an exact value, both always the same.

import { digits, element } from "/assets/common.js";

const STEPS = 1000;

// auto: the planner chooses unless told; figures: digits a slider rounds to; only: shown and sent with carried shares
// ("carry") or without ("round"); usual: not sent where it has the value it starts with.
export const SETTINGS = [
  { name: "epsilon", home: "promise", label: "ε, privacy loss", low: 0.1, high: 20, log: true, figures: 2, start: 3, step: "any", help: "over all rounds a client takes part in; smaller is more private" },
  { name: "delta", home: "promise", label: "δ", low: 1e-10, high: 1e-2, log: true, figures: 1, start: 1e-5, step: "any", help: "chance that the promise fails" },
  { name: "rounds", home: "promise", label: "Rounds", low: 1, high: 1000, log: true, whole: true, figures: 2, start: 30, help: "of the whole training" },
  { name: "participants", home: "round", label: "Participants", low: 3, high: 2000, log: true, whole: true, figures: 2, start: 200, help: "clients in a round" },
  { name: "parameters", home: "round", label: "Model size", low: 100, high: 1e8, log: true, whole: true, figures: 2, start: 199210, help: "numbers that are trained: a longer update carries more noise" },
  { name: "neighbours", home: "round", label: "Neighbours", low: 1, high: 199, log: true, whole: true, figures: 2, start: 30, auto: true, only: "round", help: "clients each one sends noise shares to" },
  { name: "kappa", home: "round", label: "κ, strength of the shares", low: 0.25, high: 100, log: true, figures: 2, start: 4, auto: true, step: "any", help: "in units of the noise a client would need alone" },
  { name: "carry", home: "across", label: "Carry shares to the next round", toggle: true, help: "one cohort adds noise, a later one takes it out again" },
  { name: "clients", home: "across", label: "Clients", low: 3, high: 100000, log: true, whole: true, figures: 2, start: 1000, only: "carry", help: "in all; rounds are filled from them in turn" },
  { name: "pattern", home: "across", label: "How clients come back", options: { cyclic: "cyclic: fixed cohorts take turns", any: "any: at least so many rounds apart" }, start: "cyclic", usual: true, only: "carry" },
  { name: "collusion", home: "trouble", label: "Collusion", low: 0, high: 0.9, figures: 2, start: 0, step: "any", help: "share of participants that tell the server all they know" },
  { name: "dropout", home: "trouble", label: "Dropout", low: 0, high: 0.5, figures: 2, start: 0, step: "any", help: "share of participants that never upload" },
  { name: "mode", home: "trouble", label: "When clients drop out", options: { tolerate: "tolerate: their noise stays in the sum", repair: "repair: a committee takes it out" }, start: "tolerate" },
  { name: "participations", home: "rest", label: "Rounds one client takes part in", low: 1, high: 30, log: true, whole: true, figures: 2, start: 30, auto: true, autoLabel: "all rounds", only: "round" },
  { name: "clip", home: "rest", label: "Clip", low: 0.01, high: 100, log: true, figures: 2, start: 1, step: "any", help: "L2 bound on a client's update" },
  { name: "relation", home: "rest", label: "What is hidden", options: { "zero-out": "zero-out: what a client sent", "replace-one": "replace-one: any other data instead" }, start: "zero-out" },
];

export class Control {
  constructor(setting, changed) {
    this.setting = setting;
    this.changed = changed;
    this.high = setting.high;
    this.box = element("div", { class: "control" });
    if (setting.toggle) this.buildSwitch();
    else if (setting.options) this.buildChoice();
    else this.buildSlider();
    document.getElementById(setting.home).append(this.box);
    this.set(setting.auto ? null : setting.start);
  }

  buildSwitch() {
    const { name, label, help } = this.setting;
    const id = `set-${name}`;
    this.toggle = element("input", { type: "checkbox", role: "switch", id, name, "aria-describedby": `${id}-help` });
    this.toggle.addEventListener("change", () => this.changed(this));
    this.box.classList.add("toggle");
    this.box.append(element("label", { for: id }, this.toggle, label), element("p", { class: "help", id: `${id}-help` }, help));
  }

  buildChoice() {
    const { name, label, options } = this.setting;
    const id = `set-${name}`;
    this.choice = element("select", { id, name });
    for (const [value, words] of Object.entries(options)) this.choice.append(element("option", { value }, words));
    this.choice.addEventListener("change", () => this.changed(this));
    this.box.append(element("label", { for: id }, label), this.choice);
  }

  buildSlider() {
    const { name, label, help, auto, autoLabel, whole, low, step } = this.setting;
    const id = `set-${name}`;
    const note = help ? `${id}-help` : null;
    this.range = element("input", { type: "range", id: `${id}-range`, min: 0, max: STEPS, step: 1, "aria-label": `${label}, slider`, "aria-describedby": note });
    this.field = element("input", { type: "number", id, name, step: whole ? 1 : step || "any", min: low > 0 && whole ? 1 : 0, inputmode: whole ? "numeric" : "decimal", "aria-describedby": note });
    this.range.addEventListener("input", () => this.move());
    this.field.addEventListener("input", () => this.type());
    this.box.append(element("label", { for: id }, label), this.field, this.range);
    if (auto) {
      this.auto = element("input", { type: "checkbox", id: `${id}-auto` });
      this.auto.addEventListener("change", () => {
        this.set(this.auto.checked ? null : this.remembered ?? this.setting.start);
        this.changed(this);
      });
      this.box.append(element("label", { class: "auto", for: `${id}-auto` }, this.auto, autoLabel || "let the planner choose"));
    }
    if (help) this.box.append(element("p", { class: "help", id: note }, help));
  }

  // The value as it is sent: null means the planner's choice.
  get value() {
    if (this.box.hidden) return null;
    if (this.toggle) return this.toggle.checked ? "true" : null;
    if (this.auto?.checked) return null;
    const value = this.choice ? this.choice.value : this.field.value;
    if (this.setting.usual && value === String(this.setting.start)) return null;
    return value === "" ? undefined : value;
  }

  set(value) {
    if (this.toggle) {
      this.toggle.checked = value === "true";
      return;
    }
    if (this.choice) {
      this.choice.value = value in this.setting.options ? value : this.setting.start;
      return;
    }
    if (this.auto) {
      this.auto.checked = value === null;
      this.range.disabled = this.field.disabled = value === null;
    }
    if (value !== null) this.put(value);
  }

  // What the planner chose, shown in the greyed field.
  suggest(value) {
    this.remembered = this.setting.whole ? Math.round(value) : Number(digits(value, this.setting.figures));
    if (this.auto?.checked) this.put(Number(digits(value, 3)));
  }

  // Of a value that was given for a larger round, as much as fits; one that is being typed is left, and refused with the reason.
  limit(high, lower) {
    this.high = Math.max(high, this.setting.low + 1);
    if (lower && !this.auto?.checked && Number(this.field.value) > high) this.put(high);
    this.slide();
  }

  put(value) {
    this.field.value = String(value);
    this.slide();
  }

  // To the nearest multiple: what fills whole cohorts.
  snap(step) {
    const value = Number(this.field.value);
    if (value > 0 && step > 0) this.put(Math.max(1, Math.round(value / step)) * step);
  }

  type() {
    this.slide();
    this.changed(this, true);
  }

  move() {
    const { low, log, whole, figures } = this.setting;
    const share = this.range.value / STEPS;
    let value = log ? low * (this.high / low) ** share : low + (this.high - low) * share;
    value = share === 1 ? this.high : Number(value.toPrecision(figures));
    if (!log) value = Math.round(value * 100) / 100;
    if (whole) value = Math.round(value);
    this.field.value = String(value);
    this.say();
    this.changed(this);
  }

  slide() {
    const { low, log } = this.setting;
    const value = Number(this.field.value);
    const inside = Math.min(this.high, Math.max(low, Number.isFinite(value) ? value : low));
    const share = log ? Math.log(inside / low) / Math.log(this.high / low) : (inside - low) / (this.high - low);
    this.range.value = Math.round(share * STEPS);
    this.say();
  }

  say() {
    this.range.setAttribute("aria-valuetext", this.field.value);
  }
}
