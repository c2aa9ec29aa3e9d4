// One session: its terminal, processes, connections, steps and checkpoints, each under a tab of its own.

import { actionButton } from "./actions.js";
import { get, live, named } from "./api.js";
import { bars } from "./charts.js";
import { h, put, table, trouble } from "./dom.js";
import { eventsIn } from "./events.js";
import { age, command, duration, lasting, size, when } from "./format.js";
import { shareButton } from "./share.js";
import { connections, labels, pill, tree } from "./parts.js";
import { steps } from "./steps.js";
import { terminal } from "./terminal.js";

const TABS = {
  terminal: "Terminal",
  processes: "Processes",
  connections: "Connections",
  steps: "Steps",
  checkpoints: "Checkpoints",
  events: "Events",
};
export const LINKED = ["terminal", "processes"]; // what a link shows
const LIVES = new Set(["running", "paused"]);

/** The tabs that have something to show: only a holder has a terminal, and only what runs has processes. */
function useful(body) {
  if (!body) return ["checkpoints", "events"];
  const found = body.holder ? ["terminal"] : [];
  if (LIVES.has(body.state)) found.push("processes", "connections");
  if (body.holder) found.push("steps");
  return [...found, "checkpoints", "events"];
}

/** `asked` is the tab that the address names; without one it is the terminal where there is one. */
export function sessionView(page, name, asked, about) {
  let tab = null,
    met = false,
    offered = "",
    left = null;
  const facts = h("div", { class: "facts" });
  const actions = h("div", { class: "actions" });
  const content = h("div", { class: "tab" }, h("p", { class: "empty" }, "asking…"));
  const tabs = h("nav", { class: "tabs", "aria-label": `views of ${name}` });
  page.replaceChildren(
    h(
      "div",
      { class: "heading session" },
      h("h1", {}, !about.link && h("a", { href: "#/", class: "back", "aria-label": "all sessions" }, "‹"), name),
      facts,
      actions,
    ),
    tabs,
    content,
  );

  let shown = "";
  const drawHead = () => {
    const body = live.find(name);
    const now = JSON.stringify([body, live.connected, Boolean(live.sessions)]);
    if (now === shown) return;
    shown = now;
    if (!body) {
      facts.replaceChildren(h("span", { class: "quiet" }, live.sessions ? "not on this host" : "…"));
      actions.replaceChildren();
      return;
    }
    put(
      facts,
      pill(body),
      h("span", { title: when(body.since) }, LIVES.has(body.state) ? lasting(body.since) : age(body.since)),
      body.pid && h("span", { class: "quiet" }, `PID ${body.pid}`),
      body.incarnation > 1 && h("span", { class: "quiet" }, `incarnation ${body.incarnation}`),
      h("code", { title: command(body.command) }, command(body.command)),
      labels(body.labels),
    );
    put(actions, about.read_only || about.link ? [] : buttons(body), !about.link && body.holder && shareButton(name));
  };
  const buttons = (body) => {
    const found = [];
    if (LIVES.has(body.state)) {
      if (body.holder) found.push(actionButton(body.state === "paused" ? "resume" : "pause", name));
      found.push(...["snapshot", "fork", "dump", "kill"].map((action) => actionButton(action, name)));
    } else {
      const more = { checkpoint: body.checkpoint };
      if (body.checkpoint && !body.moved_to) found.push(actionButton("restore", name, { more }));
      if (body.state !== "checkpointed") found.push(actionButton("forget", name, { done: () => (location.hash = "#/") }));
      else if (!body.moved_to) found.push(actionButton("kill", name));
    }
    return found;
  };
  const drawTabs = () => {
    const found = about.link ? LINKED : live.sessions ? useful(live.find(name)) : Object.keys(TABS);
    const shown = Object.keys(TABS).filter((key) => key === tab || found.includes(key));
    if (shown.join() === offered) return;
    offered = shown.join();
    put(
      tabs,
      shown.map((key) => h("a", { href: `#/s/${named(name)}/${key}`, "aria-current": key === tab ? "page" : null }, TABS[key])),
    );
  };
  const open = (chosen) => {
    if (chosen === tab) return;
    left?.();
    left = null;
    offered = "";
    tab = chosen;
    content.className = `tab ${tab}`;
    const views = { terminal, processes, connections: connectionsTab, steps: stepsTab, checkpoints: checkpointsTab, events: eventsIn };
    if (Object.hasOwn(views, tab)) left = views[tab](content, name, about);
    else content.replaceChildren(h("p", { class: "empty" }, "there is no such page"));
  };
  const changed = () => {
    drawHead();
    const body = live.find(name);
    // A session that was started a moment ago is not in the list at first.
    if (!asked && !met && (body || (tab === null && (live.sessions || live.error)))) open(body?.holder ? "terminal" : "checkpoints");
    met ||= Boolean(body);
    drawTabs();
  };
  live.addEventListener("change", changed);
  if (asked) open(asked);
  changed();
  return () => {
    live.removeEventListener("change", changed);
    left?.();
  };
}

/** Ask now, when the session changes, and every `period`, if there is one, while the page is seen; `show` fills the element. */
function asked(element, question, show, { name, period }) {
  let over = false,
    timer = null,
    running = false,
    known = null;
  const again = async () => {
    clearTimeout(timer);
    if (over || running) return;
    running = true;
    try {
      const answer = await question();
      if (!over) show(answer, again);
    } catch (error) {
      if (!over) element.replaceChildren(trouble(error, again));
    }
    running = false;
    if (period && !over) timer = setTimeout(() => (document.hidden ? wait() : again()), period);
  };
  const wait = () => document.addEventListener("visibilitychange", again, { once: true });
  const changed = () => {
    const now = JSON.stringify(live.find(name) ?? null);
    if (known !== null && now !== known) again();
    known = now;
  };
  live.addEventListener("change", changed);
  element.replaceChildren(h("p", { class: "empty" }, "asking…"));
  again();
  return () => {
    over = true;
    clearTimeout(timer);
    live.removeEventListener("change", changed);
  };
}

function processes(content, name) {
  return asked(
    content,
    () => get(`sessions/${named(name)}/tree`),
    (found) => {
      const memory = found.reduce((sum, process) => sum + process.rss, 0);
      content.replaceChildren(
        h("p", { class: "quiet" }, `${found.length === 1 ? "1 process" : `${found.length} processes`}, ${size(memory)} resident`),
        tree(found),
      );
    },
    { name, period: 3000 },
  );
}

function connectionsTab(content, name) {
  return asked(
    content,
    () => get(`sessions/${named(name)}/connections`),
    (found, again) => {
      content.replaceChildren(
        connections(found),
        h("p", { class: "quiet" }, "What a dump now would decide, by the rules of the configuration. "),
        h("button", { onclick: again }, "Look again"),
      );
    },
    { name },
  ); // not by itself: a peer may have to be asked what it speaks
}

function stepsTab(content, name) {
  return asked(
    content,
    () => get(`sessions/${named(name)}/steps`),
    (found) => put(content, steps(found)),
    { name, period: 3000 },
  );
}

/** Two checkpoints to choose, the last two at first. */
function comparison(checkpoints) {
  const select = (label, chosen) =>
    h(
      "select",
      { "aria-label": label },
      checkpoints.toReversed().map((c, i) => h("option", { value: c.id, selected: i === chosen }, `${c.session}@${c.number}`)),
    );
  const before = select("Compare", 1);
  const after = select("with", 0);
  const go = () => (location.hash = `#/d/${before.value}/${after.value}`);
  return h("div", { class: "comparison" }, "Compare", before, "with", after, h("button", { onclick: go }, "Compare"));
}

function checkpointsTab(content, name) {
  const charts = h("div", { class: "charts" });
  const list = h("div", {});
  const place = h("div", {});
  let timed = new Map();
  content.replaceChildren(charts, place);

  function draw(found) {
    const href = (c) => `#/c/${c.id}`;
    const recent = found.checkpoints.slice(-60);
    const points = (value) =>
      recent.map((c) => ({ value: value(c), label: `${name}@${c.number}, ${age(c.created)}`, href: href(c) }));
    if (recent.length) {
      charts.replaceChildren(
        bars({ title: "Memory of the tree", kind: "memory", points: points((c) => c.bytes.memory), show: size, unit: 1024 }),
        bars({ title: "Added to the store", kind: "stored", points: points((c) => c.bytes.stored), show: size, unit: 1024 }),
        bars({ title: "Stood still", kind: "frozen", points: points((c) => timed.get(c.id)?.frozen_ms), show: duration }),
      );
    }
    const columns = [
      { name: "Checkpoint" },
      { name: "Taken" },
      { name: "Memory", right: true },
      { name: "Added", right: true },
      { name: "Stood still", right: true },
      { name: "Host", minor: true },
      { name: "Labels", minor: true },
    ];
    list.replaceChildren(
      table(
        columns,
        found.checkpoints
          .toReversed()
          .map((c) => [
            h("a", { href: href(c) }, `${name}@${c.number}`),
            h("span", { title: when(c.created) }, age(c.created)),
            size(c.bytes.memory),
            size(c.bytes.stored),
            duration(timed.get(c.id)?.frozen_ms),
            c.host,
            [c.pinned && h("span", { class: "label" }, "pinned"), ...labels(c.labels)],
          ]),
        "no checkpoints of it in the store",
      ),
    );
    if (found.count > found.checkpoints.length)
      list.append(h("p", { class: "quiet" }, `and ${found.count - found.checkpoints.length} older ones`));
    if (found.checkpoints.length > 1) list.append(comparison(found.checkpoints));
    place.replaceChildren(list);
  }

  return asked(
    place,
    async () => {
      const found = await get(`sessions/${named(name)}/checkpoints`);
      if (found.count && !timed.size) draw(found);
      timed = new Map((found.count ? await get(`sessions/${named(name)}/timings`) : []).map((one) => [one.id, one]));
      return found;
    },
    draw,
    { name, period: 30000 },
  );
}
