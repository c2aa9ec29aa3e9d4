// What several pages show: states, trees of processes, connections.

import { h, table } from "./dom.js";
import { command, size } from "./format.js";

/** A state as a coloured word. */
export function pill(body) {
  const ended =
    body.state === "exited"
      ? body.exit_signal
        ? `exited, signal ${body.exit_signal}`
        : `exited ${body.exit_code ?? ""}`
      : body.state;
  const failed = body.state === "exited" && body.exit_code ? " failed" : "";
  return h("span", { class: `pill ${body.state}${failed}` }, body.moved_to ? `moved to ${body.home}` : ended.trim());
}

export function labels(found) {
  return Object.entries(found ?? {}).map(([key, value]) => h("span", { class: "label" }, `${key}=${value}`));
}

/** Processes drawn like pstree; a parent that is not among them makes a root. */
export function tree(processes, { states = true } = {}) {
  const byPid = new Map(processes.map((process) => [process.pid, process]));
  const children = new Map();
  const roots = [];
  for (const process of processes) {
    if (byPid.has(process.ppid) && process.ppid !== process.pid) {
      children.set(process.ppid, [...(children.get(process.ppid) ?? []), process]);
    } else roots.push(process);
  }
  const rows = [];
  const drawn = new Set();
  const draw = (process, lead, below) => {
    if (drawn.has(process.pid)) return;
    drawn.add(process.pid);
    const threads = Array.isArray(process.threads) ? process.threads.length : process.threads;
    const words = process.argv?.length ? command(process.argv) : `[${process.command}]`;
    rows.push(
      h(
        "li",
        { class: states && `state-${process.state}` },
        h("span", { class: "lead", "aria-hidden": "true" }, lead),
        h("span", { class: "pid" }, process.pid),
        h("span", { class: "words", title: words }, words),
        threads > 1 && h("span", { class: "note" }, `${threads} threads`),
        states &&
          process.state &&
          "TtZ".includes(process.state) &&
          h("span", { class: "note" }, process.state === "Z" ? "zombie" : "stopped"),
        process.rss !== undefined && h("span", { class: "note right" }, size(process.rss)),
      ),
    );
    const kids = children.get(process.pid) ?? [];
    kids.forEach((kid, i) => {
      const end = i === kids.length - 1;
      draw(kid, `${below}${end ? "└─ " : "├─ "}`, `${below}${end ? "   " : "│  "}`);
    });
  };
  roots.forEach((root) => draw(root, "", ""));
  processes.forEach((process) => draw(process, "", ""));
  return h("div", { class: "tree", role: "group", tabindex: 0, "aria-label": "Processes" }, h("ol", {}, rows));
}

export function connections(records) {
  const columns = [
    { name: "Process", mono: true },
    { name: "Protocol" },
    { name: "State" },
    { name: "Local", mono: true },
    { name: "Peer", mono: true },
    { name: "At a restore" },
  ];
  const rows = records.map((c) => [
    `${c.pid}:${c.fd}`,
    c.protocol || `${c.family} ${c.type}`,
    c.state,
    c.local,
    [c.peer, c.peer_process && h("small", {}, ` ${c.peer_process}`)],
    c.external
      ? [
          h("span", { class: `policy ${c.policy}` }, c.policy + (c.application ? ` (${c.application})` : "")),
          c.reason && h("small", {}, ` ${c.reason}`),
        ]
      : h("span", { class: "quiet" }, ["listen", "bound"].includes(c.state) ? "comes back" : "inside the tree"),
  ]);
  return table(columns, rows, "no connections");
}
