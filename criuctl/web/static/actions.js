// What a page may have done, each behind a question: the server runs it as if it was typed.

import { act } from "./api.js";
import { confirm, h, toast } from "./dom.js";
import { duration, size } from "./format.js";

const ACTIONS = {
  pause: {
    title: "Pause",
    text: (name) => `Every process of ${name} is frozen where it is, until it is resumed.`,
  },
  resume: { title: "Resume", text: (name) => `${name} goes on.` },
  snapshot: {
    title: "Snapshot",
    text: (name) => `${name} is frozen for a moment, stored as a checkpoint, and runs on.`,
    action: "Take a snapshot",
  },
  fork: {
    title: "Fork",
    text: (name) => `A running copy of ${name} is made, which goes on from this moment. `
      + "Both use the same files: the copy writes into them as well.",
    action: "Make a copy",
  },
  dump: {
    title: "Dump and end",
    text: (name) => `${name} is stored as a checkpoint, and then ended. A restore brings it back as it was.`,
    action: "Dump and end it",
    danger: true,
  },
  kill: {
    title: "Kill",
    text: (name) => `Every process of ${name} is ended. Nothing is stored: what was done since its last checkpoint is lost.`,
    action: "Kill it",
    danger: true,
  },
  forget: {
    title: "Forget",
    text: (name) => `The output of ${name}, its audit log and its line in the list are removed from this host. Its checkpoints stay.`,
    action: "Forget it",
    danger: true,
  },
  restore: {
    title: "Restore",
    text: (name) => `${name} is brought back to life on this host, as it was when the checkpoint was taken.`,
  },
  copy: {
    title: "Restore as a copy",
    text: (name) => `A second session begins as ${name} was. Both use the same files: the copy writes into them as well.`,
    action: "Restore the copy",
    request: "restore",
    fields: [{ name: "as", label: "Name of the copy", required: true }],
  },
  run: {
    title: "New session",
    text: () => "A command runs under a terminal that stays when this page is closed.",
    action: "Start it",
    fields: [
      { name: "session", label: "Name (empty: made from the command)" },
      { name: "command", label: "Command", value: "bash", required: true },
    ],
  },
};

function outcome(action, name, body) {
  switch (action) {
    case "snapshot":
    case "dump":
      return `${name}@${body.number ?? "?"} is stored: ${size(body.bytes?.memory)} of memory, stood still for ${duration(body.frozen_ms)}`;
    case "fork":
      return `${body.forks[0].session} runs, PID ${body.forks[0].pid}`;
    case "restore":
    case "copy":
    case "run":
      return `${body.session} runs, PID ${body.pid}`;
    case "kill":
      return `${name} is ended, nothing is left`;
    case "forget":
      return `${name} is forgotten`;
    default:
      return `${name} is ${body.state}`;
  }
}

/** A button that asks for confirmation, then acts; `more` holds what the server needs besides the session's name. */
export function actionButton(action, name, { more = {}, done } = {}) {
  const what = ACTIONS[action];
  const button = h("button", { class: what.danger ? "danger" : "", "data-action": action }, what.title);
  button.addEventListener("click", async () => {
    const question = { action: what.title, ...what, title: name ? `${what.title}: ${name}` : what.title, text: what.text(name) };
    const given = await confirm(question);
    if (!given) return;
    button.disabled = true;
    button.classList.add("busy");
    try {
      const body = await act({ action: what.request ?? action, session: name, ...more, ...given });
      toast(outcome(action, name, body), body.exit_code === 11 ? "warning" : "good");
      for (const text of body.warnings ?? []) toast(text, "warning");
      done?.(body);
    } catch (error) {
      toast(error.hint ? `${error.message} (${error.hint})` : error.message, "error");
    } finally {
      button.disabled = false;
      button.classList.remove("busy");
    }
  });
  return button;
}
