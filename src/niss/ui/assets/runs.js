// The list of runs, asked for again while one of them is in progress.

import { byId, follow } from "/assets/common.js";

follow("/api/runs", byId("list"), ({ runs }) => (runs.some((run) => run.state === "running") ? 3000 : 10000));
