// The shared code of both JavaScript runners. benches/peers/rust/runner/src/lib.rs describes the protocol.
import { createInterface } from "node:readline";

const FILL_ROWS = 500;
const PAYLOAD_BYTES = 512;

const [url, count, mode] = process.argv.slice(2);
if (!["defaults", "tuned"].includes(mode)) {
  console.error("usage: main.mjs URL JOBS defaults|tuned");
  process.exit(2);
}

export const jobs = Number(count);
export const isTuned = mode === "tuned";
export const payload = { data: "x".repeat(PAYLOAD_BYTES) };
export { url };

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
let handledJobs = 0;

/** Calls `insert` with the size of each batch until the queue is filled. */
export async function fill(insert) {
  for (let left = jobs; left > 0; left -= FILL_ROWS) {
    await insert(Math.min(left, FILL_ROWS));
  }
}

/** Reports that the queue is filled, and waits until the driver starts the clock. */
export async function filled(settings) {
  console.log(JSON.stringify({ settings }));
  await lines.next();
  // The driver kills this process when it has measured. If the driver crashes, the input ends.
  lines.next().then(() => process.exit(0));
}

/** Called by the handlers, which do nothing else. */
export function handled(count) {
  handledJobs += count;
  if (handledJobs >= jobs && handledJobs - count < jobs) {
    console.log("handled");
  }
}
