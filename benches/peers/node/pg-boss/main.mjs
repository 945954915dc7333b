// pg-boss for Node.js. It has no benchmark; it is tuned with the options that its documentation offers for a backlog.
import { PgBoss } from "pg-boss";
import { fill, filled, handled, isTuned, payload, url } from "../runner.mjs";

const QUEUE = "peer";
const settings = isTuned ? { batchSize: 500, burstWhenBatchFull: true, localConcurrency: 4, pollingIntervalSeconds: 0.5 } : {};

const boss = new PgBoss(url);
boss.on("error", console.error);
await boss.start();
await boss.createQueue(QUEUE);
const job = { data: payload };
await fill((count) => boss.insert(QUEUE, Array(count).fill(job)));

await filled(settings);
await boss.work(QUEUE, settings, async (jobs) => handled(jobs.length));
