// What all pages share: asking the server, showing faults, and writing numbers.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

export class Fault extends Error {
  constructor(message, hint) {
    super(message);
    this.hint = hint || "";
  }
}

export async function ask(path, signal) {
  let answer;
  try {
    answer = await fetch(path, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The server does not answer.", "Is niss ui still running?");
  }
  let body;
  try {
    body = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault(`The server failed (${answer.status}).`, "Its terminal says more.");
  }
  if (!answer.ok) throw new Fault(body.message || `Refused (${answer.status}).`, body.hint);
  return body;
}

export function showFault(fault) {
  const box = document.getElementById("fault");
  box.hidden = fault === null;
  document.getElementById("fault-message").textContent = fault === null ? "" : fault.message;
  document.getElementById("fault-hint").textContent = fault === null ? "" : fault.hint || "";
}

export function digits(value, count = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(count - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(Math.max(count, Math.ceil(Math.log10(size))))));
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}
