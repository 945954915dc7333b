// graphile-worker for Node.js. Tuned as in its documentation and its own benchmark (perfTest), in one process.
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import { fill, filled, handled, isTuned, payload, url } from "../runner.mjs";

const tuned = {
  concurrentJobs: 24,
  maxPoolSize: 25,
  localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};
const settings = isTuned ? tuned : {};

// The default logger writes a line for each job.
const logger = new Logger(() => (level, message) => {
  if (level === "error") console.error(message);
});

const utils = await makeWorkerUtils({ connectionString: url, logger });
await utils.migrate();
const job = { identifier: "no_op", payload };
await fill((count) => utils.addJobs(Array(count).fill(job)));
await utils.release();

await filled(settings);
await run({
  preset: { worker: { connectionString: url, logger, ...settings } },
  taskList: { no_op: async () => handled(1) },
});
