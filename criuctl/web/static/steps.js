// The durable steps of a session, the newest first.

import { h, table } from "./dom.js";
import { age, when } from "./format.js";

const COLUMNS = [
  { name: "Step" },
  { name: "Kind", minor: true },
  { name: "State" },
  { name: "Progress", right: true },
  { name: "Attempts", right: true, minor: true },
  { name: "Began" },
  { name: "Ended" },
  { name: "Error" },
];

// By the colours of sessions' states: good, attention, bad.
const LOOKS = { began: "checkpointed", done: "running", unknown: "paused", failed: "failed" };

/** The list, of what the server answers. */
export function steps(found) {
  const moment = (time) => time && h("span", { title: when(time) }, age(time));
  const rows = found.steps
    .toReversed()
    .map((step) => [
      h("code", {}, step.id),
      step.kind,
      h("span", { class: `pill ${LOOKS[step.state]}` }, step.state),
      step.progress === null ? "" : `${Math.round(step.progress * 100)} %`,
      step.attempts,
      moment(step.began),
      moment(step.ended),
      step.error,
    ]);
  const older = found.count - found.steps.length;
  return [
    table(COLUMNS, rows, "no steps"),
    older > 0 && h("p", { class: "quiet" }, `and ${older} older ones`),
    found.steps.some((step) => step.state === "unknown") &&
      h("p", { class: "quiet" }, "How an unknown step has ended is stated with: criuctl step resolve"),
  ];
}
