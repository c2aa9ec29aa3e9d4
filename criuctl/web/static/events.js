// The last events of this host, or of one session: every operation that changed something, or failed to.

import { get, live, named } from "./api.js";
import { h, table, trouble } from "./dom.js";
import { age, duration, plural, size, when } from "./format.js";

const COLUMNS = [{ name: "When" }, { name: "Operation" }, { name: "Session" }, { name: "Outcome" }, { name: "Facts", minor: true }];
const OFTEN = 3000; // milliseconds between two questions, however much changes

function facts(event) {
  const found = [];
  const took = event.total_ms ?? (event.seconds ? event.seconds * 1000 : null);
  if (took) found.push(duration(took));
  if (event.frozen_ms) found.push(`stood still ${duration(event.frozen_ms)}`);
  if (event.bytes?.stored !== undefined) found.push(`${size(event.bytes.stored)} stored`);
  if (event.freed_bytes) found.push(`${size(event.freed_bytes)} freed`);
  if (event.removed !== undefined) found.push(`${event.removed} removed`);
  if (event.to) found.push(`to ${event.to}`);
  if (event.warnings) found.push(plural(event.warnings, "warning"));
  return found.join(", ");
}

function subject(event) {
  if (!event.session) return event.schedule ?? event.pid ?? "";
  const name = event.number ? `${event.session}@${event.number}` : event.session;
  return h("a", { href: event.checkpoint ? `#/c/${event.checkpoint}` : `#/s/${named(event.session)}` }, name);
}

function outcome(event) {
  const bad = event.outcome === "failed" || event.outcome === "interrupted";
  if (!bad) return event.outcome ?? "";
  return h("span", { class: "pill failed" }, `${event.outcome}, ${event.exit_code}${event.error ? ` (${event.error})` : ""}`);
}

/** Fill the element with the events of `name`, or of all; returns how to leave it. */
export function eventsIn(element, name) {
  let over = false,
    timer = null,
    asked = 0;
  const ask = async () => {
    timer = null;
    asked = Date.now();
    try {
      const found = await get(name ? `events?session=${named(name)}` : "events");
      if (over) return;
      const rows = found.map((event) => [
        h("span", { title: when(event.time) }, age(event.time)),
        event.operation,
        subject(event),
        outcome(event),
        facts(event),
      ]);
      element.replaceChildren(table(COLUMNS, rows, "no events"));
    } catch (error) {
      if (!over) element.replaceChildren(trouble(error, ask));
    }
  };
  const changed = () => {
    timer ??= setTimeout(ask, Math.max(500, asked + OFTEN - Date.now()));
  };
  live.addEventListener("change", changed);
  element.replaceChildren(h("p", { class: "empty" }, "asking…"));
  ask();
  return () => {
    over = true;
    clearTimeout(timer);
    live.removeEventListener("change", changed);
  };
}

export function eventsView(page) {
  const place = h("div", {});
  page.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, h("a", { href: "#/", class: "back", "aria-label": "all sessions" }, "‹"), "Events")),
    place,
  );
  return eventsIn(place, "");
}
