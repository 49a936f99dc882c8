// What all pages share: asking the server, showing its faults and what it drew.

export const byId = (id) => document.getElementById(id);

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

// Words between backticks are code.
function showWords(part, words) {
  const pieces = words.split("`").map((piece, place) => (place % 2 ? Object.assign(document.createElement("code"), { textContent: piece }) : piece));
  part.replaceChildren(...pieces);
}

export function showFault(fault) {
  byId("fault").hidden = fault === null;
  showWords(byId("fault-message"), fault?.message ?? "");
  showWords(byId("fault-hint"), fault?.hint ?? "");
}

// Asks again and again, and shows the page's part of the answer; `pause` says in milliseconds for how long it holds, null: for good.
export async function follow(path, part, pause) {
  let wait = 5000;
  if (!document.hidden) {
    try {
      const answer = await ask(path);
      showFault(null);
      // Without a change nothing is replaced, so that what is being read, and the keyboard's focus, stay.
      if (answer.html !== part.shown && !part.contains(document.activeElement)) part.innerHTML = part.shown = answer.html;
      wait = pause(answer);
    } catch (fault) {
      showFault(fault);
    }
  }
  if (wait !== null) setTimeout(() => follow(path, part, pause), wait);
}

// Charts are read under the pointer or, where they have the focus, with the arrow keys.
export function readCharts() {
  const read = (chart, band) => {
    for (const other of chart.querySelectorAll(".read")) other.classList.remove("read");
    band?.classList.add("read");
    const texts = band ? [...band.querySelectorAll("text")].map((text) => text.textContent) : [];
    chart.querySelector("[aria-live]").textContent = texts.join(", ");
  };
  document.addEventListener("focusout", (event) => event.target.matches(".frame") && read(event.target, null));
  document.addEventListener("keydown", (event) => {
    const chart = event.target;
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const bands = [...chart.querySelectorAll(".frame .band")].filter((band) => band.checkVisibility());
    if (move === undefined || !chart.matches(".frame") || !bands.length) return;
    event.preventDefault();
    const now = bands.findIndex((band) => band.classList.contains("read"));
    read(chart, bands[Math.min(bands.length - 1, Math.max(0, (now < 0 && move < 0 ? bands.length : now) + move))]);
  });
}
