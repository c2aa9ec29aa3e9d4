// What one checkpoint holds.

import { actionButton } from "./actions.js";
import { get, named } from "./api.js";
import { stack } from "./charts.js";
import { h, table, trouble } from "./dom.js";
import { age, duration, size, when } from "./format.js";
import { connections, labels, tree } from "./parts.js";

export function checkpointView(page, id, about) {
  let over = false;
  const ask = async () => {
    page.replaceChildren(h("p", { class: "empty" }, "asking the store…"));
    try {
      const body = await get(`checkpoints/${named(id)}`);
      if (!over) draw(body);
    } catch (error) {
      if (!over)
        page.replaceChildren(
          h("div", { class: "heading" }, h("h1", {}, h("a", { href: "#/", class: "back", "aria-label": "all sessions" }, "‹"), "Checkpoint")),
          trouble(error, ask),
        );
    }
  };

  function draw(c) {
    const sum = (kind) => c.memory.filter((image) => image.kind === kind).reduce((total, image) => total + image.bytes, 0);
    const parts = [
      { name: "memory of processes", kind: "private", value: sum("task") },
      { name: "shared memory", kind: "shared", value: sum("shmem") },
      { name: "files taken along", kind: "carried", value: c.bytes.files ?? 0 },
    ];
    const fact = (name, ...value) => [h("dt", {}, name), h("dd", {}, ...value)];
    const spaces = c.memory.toSorted((a, b) => b.bytes - a.bytes);
    const names = new Map(c.processes.map((p) => [p.ns_pid, p.command]));
    page.replaceChildren(
      h(
        "div",
        { class: "heading session" },
        h(
          "h1",
          {},
          h("a", { href: `#/s/${named(c.session)}/checkpoints`, class: "back", "aria-label": "its session" }, "‹"),
          `${c.session}@${c.number}`,
        ),
        h(
          "div",
          { class: "facts" },
          c.pinned && h("span", { class: "label" }, "pinned"),
          h("span", { title: when(c.created) }, age(c.created)),
          h("code", {}, c.id),
          labels(c.labels),
        ),
        !about.read_only &&
          h(
            "div",
            { class: "actions" },
            actionButton("restore", `${c.session}@${c.number}`, { more: { checkpoint: c.id } }),
            actionButton("copy", `${c.session}@${c.number}`, {
              more: { checkpoint: c.id },
              done: (body) => (location.hash = `#/s/${named(body.session)}`),
            }),
          ),
      ),
      c.warnings.length
        ? h(
            "section",
            { class: "warnings" },
            h("h2", {}, "Warnings"),
            h(
              "ul",
              {},
              c.warnings.map((text) => h("li", {}, text)),
            ),
          )
        : "",
      h(
        "section",
        { class: "card" },
        h(
          "dl",
          {},
          fact("Taken", `${when(c.created)} on ${c.host}`),
          fact("Stood still", `${duration(c.timings.frozen_ms)} of ${duration(c.timings.total_ms)} in all`),
          fact("Stored", `${size(c.bytes.stored)}, for ${size(c.bytes.new)} that the store did not have`),
          fact("Incarnation", c.incarnation),
          fact("Host", `Linux ${c.machine.kernel ?? "?"}, ${c.machine.arch ?? "?"}, ${c.machine.cpu_model ?? ""}`),
          fact("Made by", `criuctl ${c.criuctl}, CRIU ${c.criu.version ?? "?"}`),
        ),
      ),
      h(
        "section",
        {},
        h("h2", {}, "Memory"),
        stack(parts, size),
        h(
          "details",
          {},
          h("summary", {}, "by address space"),
          table(
            [{ name: "Of" }, { name: "Pages", right: true }, { name: "Stored", right: true }],
            spaces.map((image) => [
              image.kind === "task" ? `process ${image.id} ${names.get(image.id) ?? ""}` : `shared memory ${image.id}`,
              image.pages,
              size(image.bytes),
            ]),
            "none",
          ),
        ),
      ),
      h("section", {}, h("h2", {}, "Processes"), tree(c.processes, { states: false })),
      h("section", {}, h("h2", {}, "Connections"), connections(c.connections)),
      h("section", {}, h("h2", {}, `Files (${c.files_count})`), files(c)),
    );
  }
  ask();
  return () => {
    over = true;
  };
}

function files(c) {
  const rows = c.files.map((file) => [
    file.path,
    size(file.size),
    file.kind,
    file.carried ? "contents" : file.digest ? "size and hash" : "size",
    file.holders
      .map(([pid, fd]) => `${pid}:${fd}`)
      .slice(0, 4)
      .join(" ") + (file.holders.length > 4 ? " …" : ""),
  ]);
  const columns = [
    { name: "Path", mono: true },
    { name: "Size", right: true },
    { name: "How" },
    { name: "Kept", minor: true },
    { name: "Held by", mono: true, minor: true },
  ];
  return [
    table(columns, rows, "none"),
    c.files_count > c.files.length && h("p", { class: "quiet" }, `and ${c.files_count - c.files.length} more`),
  ];
}
