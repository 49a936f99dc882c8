// One run as it goes: its curves and numbers, asked for again every two seconds until it is finished.

import { byId, follow, readCharts } from "/assets/common.js";

const name = new URLSearchParams(location.search).get("run") || "";
// In milliseconds; a finished run is not asked for again.
const PAUSES = { running: 2000, stopped: 10000, finished: null };

function pause(run) {
  document.title = `${run.name} – niss`;
  byId("title").textContent = run.name;
  // Announced when it changes.
  if (byId("state").textContent !== run.state_words) byId("state").textContent = run.state_words;
  byId("state").className = `state ${run.state}`;
  return PAUSES[run.state];
}

readCharts();
follow(`/api/run?run=${encodeURIComponent(name)}`, byId("run"), pause);
