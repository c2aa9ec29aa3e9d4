// What is different between two checkpoints; nothing is restored for it.

import { get, named } from "./api.js";
import { h, table, trouble } from "./dom.js";
import { command, size, when } from "./format.js";

const PARTS = {
  processes: { title: "Processes", show: (p) => `${p.ns_pid} ${command(p.argv?.length ? p.argv : [p.command])}` },
  descriptors: { title: "Descriptors", show: (d) => `${d.pid}:${d.fd} ${d.kind} ${d.what} ${d.mode}` },
  connections: { title: "Connections", show: (c) => `${c.pid}:${c.fd} ${c.protocol || "unix"} ${c.local} ${c.peer ? `→ ${c.peer}` : ""} ${c.state}` },
  files: { title: "Files", show: (f) => `${f.path} (${f.kind}, ${size(f.size)})` },
};

const text = (value) => (value === null || value === undefined || value === "" ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

function changes(change) {
  return change.fields
    .map((field) => (field === "contents" ? "contents" : `${field}: ${text(change.before[field])} → ${text(change.after[field])}`))
    .join(", ");
}

function part(kind, body) {
  const { title, show } = PARTS[kind];
  const rows = [
    ...body.added.map((one) => ["added", show(one), ""]),
    ...body.removed.map((one) => ["removed", show(one), ""]),
    ...body.changed.map((change) => ["changed", show(change.after), changes(change)]),
  ];
  return h(
    "section",
    {},
    h("h2", {}, `${title}: ${rows.length ? `${rows.length} different` : "none changed"}, ${body.same} the same`),
    rows.length ? table([{ name: title }, { name: "What", mono: true }, { name: "Before and after", mono: true }], rows, "") : "",
  );
}

function memory(body) {
  const rows = body.spaces.flatMap((space) => {
    const whose = `${space.kind === "task" ? "process" : space.kind} ${space.after_id ?? space.before_id}`;
    const all = space.before_id === null || space.after_id === null ? [{ ...space, name: "all of it" }] : space.regions;
    return all.map((region) => [whose, region.name, ...["before", "after", "changed", "added", "removed"].map((key) => (region[key] ? size(region[key]) : ""))]);
  });
  const columns = [{ name: "Memory of" }, { name: "Region", mono: true }, ...["Before", "After", "Changed", "New", "Gone"].map((name) => ({ name, right: true }))];
  return h(
    "section",
    {},
    h("h2", {}, `Memory: ${size(body.before)} → ${size(body.after)}, ${size(body.changed)} changed${body.exact ? "" : ", by windows of 256 KiB"}`),
    rows.length ? table(columns, rows, "") : "",
  );
}

export function compareView(page, before, after) {
  let over = false;
  const ask = async () => {
    page.replaceChildren(h("p", { class: "empty" }, "asking the store…"));
    try {
      const body = await get(`differences/${named(before)}/${named(after)}`);
      if (!over) draw(body);
    } catch (error) {
      if (!over) page.replaceChildren(heading("#/", "Compare"), trouble(error, ask));
    }
  };
  const heading = (back, title) =>
    h("div", { class: "heading" }, h("h1", {}, h("a", { href: back, class: "back", "aria-label": "back" }, "‹"), title));
  const draw = (body) => {
    const side = (one) => h("a", { href: `#/c/${one.id}` }, `${one.session}@${one.number}`);
    const moments = `${when(body.before.created)} → ${when(body.after.created)}`;
    page.replaceChildren(
      heading(`#/s/${named(body.after.session)}/checkpoints`, `${body.before.session}@${body.before.number} → ${body.after.session}@${body.after.number}`),
      h("p", { class: "quiet" }, side(body.before), " → ", side(body.after), `: ${moments}. ${body.same ? "No difference." : ""}`),
      body.about.length
        ? table([{ name: "About" }, { name: "Before" }, { name: "After" }], body.about.map((row) => [row.what, text(row.before), text(row.after)]), "")
        : "",
      memory(body.memory),
      ...Object.keys(PARTS).map((kind) => part(kind, body[kind])),
    );
  };
  ask();
  return () => {
    over = true;
  };
}
