// The list of runs, asked for again while one of them is in progress.

import { ask, duration, element, percent, showFault } from "/assets/common.js";

const WORDS = { finished: "finished", running: "in progress", stopped: "stopped before its end", unreadable: "cannot be read" };

function item(run) {
  const query = `?run=${encodeURIComponent(run.name)}`;
  const facts = [];
  if (run.kind) facts.push({ comparison: `comparison of ${run.methods} methods`, attack: "attack" }[run.kind] ?? "single run");
  if (run.headline) facts.push(run.headline);
  if (run.rounds) facts.push(`${run.rounds_done} of ${run.rounds} rounds`);
  if (run.best_accuracy !== null && run.best_accuracy !== undefined) facts.push(`best accuracy ${percent(run.best_accuracy)} (${run.best_method})`);
  facts.push(`changed ${duration(run.silent_seconds)} ago`);
  const readable = run.state !== "unreadable";
  return element(
    "li",
    {},
    element("h2", {}, readable ? element("a", { href: run.state === "running" ? `/live${query}` : `/report${query}` }, run.name) : run.name),
    element("p", {}, element("span", { class: `state ${run.state}` }, WORDS[run.state]), ` ${run.title && run.title !== run.name ? run.title : ""}`),
    element("p", { class: "note" }, readable ? facts.join(" · ") : `${run.message} ${run.hint || ""}`),
    readable ? element("p", { class: "links" }, element("a", { href: `/report${query}` }, "Report", element("span", { class: "unseen" }, ` of ${run.name}`)), run.kind === "attack" ? "" : element("a", { href: `/live${query}` }, "Live", element("span", { class: "unseen" }, ` view of ${run.name}`))) : "",
  );
}

let last = "";
async function refresh() {
  let wait = 10000;
  if (!document.hidden) {
    try {
      const { folder, runs } = await ask("/api/runs");
      showFault(null);
      document.getElementById("folder").textContent = `In the folder ${folder}, newest first.`;
      document.getElementById("empty").hidden = runs.length > 0;
      // Without a change nothing is replaced, so that the keyboard focus stays where it is.
      const now = JSON.stringify(runs.map((run) => ({ ...run, silent_seconds: duration(run.silent_seconds) })));
      if (now !== last && !document.getElementById("runs").contains(document.activeElement)) {
        document.getElementById("runs").replaceChildren(...runs.map(item));
        last = now;
      }
      if (runs.some((run) => run.state === "running")) wait = 3000;
    } catch (fault) {
      showFault(fault);
    }
  }
  setTimeout(refresh, wait);
}

refresh();
