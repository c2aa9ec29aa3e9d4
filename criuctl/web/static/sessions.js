// All sessions: their state as it changes, what they use, and when each was stored last.
//
// A row is made once and then changed cell by cell, only where it is different: hundreds of rows stay quick and keep the focus.

import { actionButton } from "./actions.js";
import { get, live, named } from "./api.js";
import { h, put, trouble } from "./dom.js";
import { hostNotes, others } from "./hosts.js";
import { age, command, percent, plural, size, when } from "./format.js";
import { labels, pill } from "./parts.js";

const ORDER = ["running", "paused", "checkpointed", "lost", "exited", "stored"];
const COLUMNS = [
  { key: "session", name: "Session", value: (one) => one.session },
  { key: "state", name: "State", value: (one) => ORDER.indexOf(one.state) },
  { key: "since", name: "Since", value: (one) => -(Date.parse(one.since) || 0) },
  { key: "cpu", name: "CPU", right: true, value: (one) => -(one.usage?.[0] ?? -1) },
  { key: "memory", name: "Memory", right: true, value: (one) => -(one.usage?.[1] ?? -1) },
  { key: "stored", name: "Last checkpoint", value: (one) => -(Date.parse(one.newest?.created) || 0) },
];

const HERE = "/"; // no other host's name

// The order and the filters, which stay while the page is open.
const choice = { text: "", state: "", host: "", sort: "state", backwards: false };

export function sessionsView(page, about) {
  const filter = h("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": "Filter by name, command, state, host or label",
    value: choice.text,
    oninput: () => {
      choice.text = filter.value;
      draw();
    },
  });
  const order = h(
    "select",
    { class: "order", "aria-label": "Sort by", onchange: () => sort(order.value) },
    COLUMNS.map((column) => h("option", { value: column.key, selected: column.key === choice.sort }, column.name)),
  );
  const hosts = h(
    "select",
    {
      "aria-label": "Host",
      onchange: () => {
        choice.host = hosts.value;
        draw();
      },
    },
    [["", "all hosts"], [HERE, about.host], ...(about.hosts ?? []).map((name) => [name, name])].map(([value, name]) =>
      h("option", { value, selected: value === choice.host }, name),
    ),
  );
  const states = ORDER.map((state) => stateButton(state));
  const heads = COLUMNS.map((column) => headOf(column, sort));
  const head = h("div", { class: "row head", role: "row" }, heads, h("span", { role: "columnheader" }, h("span", { class: "unseen" }, "Labels")));
  const list = h("div", { class: "sessions", role: "table", "aria-label": "Sessions" }, head);
  const nothing = h("p", { class: "empty" }, "asking…");
  const begin = actionButton("run", "", { done: (body) => (location.hash = `#/s/${named(body.session)}`) });
  const notice = h("div", {});
  const notes = h("div", {});
  const held = h("small", { class: "held" });
  const rows = new Map();
  let newest = null,
    failure = null,
    known = "";
  page.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Sessions"), h("div", { class: "counts" }, states), about.hosts?.length ? hosts : "", order, filter, !about.read_only && begin),
    h("p", { class: "line" }, held),
    notice,
    notes,
    list,
    nothing,
  );

  async function ask() {
    try {
      newest = await get("newest");
      failure = null;
    } catch (error) {
      failure = error;
    }
    draw();
    get("store").then(
      (found) => {
        const sealed = found.encrypted ? "encrypted" : "not encrypted";
        held.textContent = `${plural(found.checkpoints, "checkpoint")} of ${plural(found.sessions, "session")} in the store, ${size(found.bytes)}, ${sealed}`;
      },
      () => {
        held.textContent = "";
      },
    );
  }

  function sort(key) {
    choice.backwards = key === choice.sort && !choice.backwards;
    choice.sort = order.value = key;
    draw();
  }

  function stateButton(state) {
    const count = h("b", {});
    const button = h("button", { class: `count ${state}`, hidden: true, "aria-pressed": "false" }, count, ` ${state}`);
    button.addEventListener("click", () => {
      choice.state = choice.state === state ? "" : state;
      draw();
    });
    button.show = (found) => {
      count.textContent = found;
      button.hidden = !found && choice.state !== state;
      button.setAttribute("aria-pressed", String(choice.state === state));
    };
    return button;
  }

  /** Sessions of this host, those that only the store knows, and those of other hosts. */
  function all() {
    const here = live.sessions.map((body) => ({ ...body, key: body.session, body, usage: live.usage.get(body.session), newest: newest?.[body.session] }));
    const names = new Set(here.map((one) => one.session));
    const kept = Object.entries(newest ?? {})
      .filter(([name]) => !names.has(name))
      .map(([name, body]) => ({ session: name, key: name, state: "stored", home: body.host, labels: body.labels, newest: body }));
    const away = others.all.flatMap(({ host, sessions }) =>
      sessions.map((body) => ({ ...body, key: `${host}/${body.session}`, host, body: JSON.stringify(body) })),
    );
    return [...here, ...kept, ...away];
  }

  function draw(ticked = false) {
    notice.replaceChildren(failure ? storeTrouble(failure, ask) : "");
    if (!live.sessions) {
      put(nothing, live.error ? trouble(live.error) : "asking…");
      return;
    }
    const found = all();
    ORDER.forEach((state, i) => states[i].show(found.filter((one) => one.state === state).length));
    heads.forEach((one) => one.show());
    const column = COLUMNS.find((one) => one.key === choice.sort);
    const shown = found
      .filter((one) => (!choice.state || one.state === choice.state) && (!choice.host || (one.host ?? HERE) === choice.host) && matches(one, choice.text))
      .map((one) => ({ one, value: column.value(one) }))
      .sort((a, b) => compared(a.value, b.value) * (choice.backwards ? -1 : 1) || compared(a.one.key, b.one.key))
      .map(({ one }) => one);
    place(shown, ticked);
    list.hidden = !shown.length;
    nothing.hidden = Boolean(shown.length);
    if (!shown.length)
      put(nothing, found.length ? "no session fits" : ["no sessions on this host; ", h("code", {}, "criuctl run --name work -- bash"), " starts one"]);
  }

  /** Have the list show these, moving and changing nothing else than what is different. */
  function place(shown, ticked) {
    let before = head;
    const wanted = new Set(shown.map((one) => one.key));
    for (const [name, row] of rows) if (!wanted.has(name)) row.element.remove();
    for (const one of shown) {
      let row = rows.get(one.key);
      if (!row) rows.set(one.key, (row = new Row(one, about)));
      row.show(one, { known: Boolean(newest), failed: Boolean(failure) }, ticked);
      if (before.nextSibling !== row.element) before.after(row.element);
      before = row.element;
    }
  }

  const used = () => draw();
  const unwatch = about.hosts?.length
    ? others.watch(() => {
        put(notes, hostNotes());
        draw();
      })
    : () => {};
  const changed = () => {
    const now = JSON.stringify(live.sessions?.map((body) => [body.session, body.checkpoint, ["running", "paused"].includes(body.state)]));
    if (now !== known) {
      known = now;
      ask();
    }
    draw();
  };
  live.addEventListener("change", changed);
  live.addEventListener("usage", used);
  const clock = setInterval(() => draw(true), 15000);
  const asking = setInterval(ask, 60000);
  if (live.sessions) changed();
  else {
    draw();
    ask();
  }
  return () => {
    unwatch();
    live.removeEventListener("change", changed);
    live.removeEventListener("usage", used);
    clearInterval(clock);
    clearInterval(asking);
  };
}

/** A store that was not made yet is no failure of a new host. */
function storeTrouble(failure, again) {
  if (failure.code === "no-such-bucket") return h("p", { class: "line quiet" }, `No checkpoints yet: ${failure.message}. ${failure.hint}`);
  return trouble({ message: `The store: ${failure.message}`, hint: failure.hint }, again);
}

function compared(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function matches(one, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return true;
  return `${one.session} ${one.host ?? ""} ${one.state} ${command(one.command)} ${Object.entries(one.labels ?? {}).join(" ")}`
    .toLowerCase()
    .includes(wanted);
}

function headOf(column, sort) {
  const cell = h(
    "span",
    { role: "columnheader", class: column.right && "right" },
    h("button", { class: "sort", onclick: () => sort(column.key) }, column.name),
  );
  cell.show = () => {
    const mine = choice.sort === column.key;
    if (mine) cell.setAttribute("aria-sort", choice.backwards ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  };
  return cell;
}

/** One row; `show` changes the cells whose content is different. */
class Row {
  #last = null;
  #shown = {};
  #cells = {};

  constructor({ session, key, host }, about) {
    this.about = about;
    const href = host ? `#/h/${named(host)}/${named(session)}` : `#/s/${named(session)}`;
    const cell = (key, attributes = {}) => (this.#cells[key] = h("span", { role: "cell", ...attributes, class: `${key} ${attributes.class ?? ""}` }));
    this.link = h("a", { href }, session);
    this.words = h("code", {});
    this.element = h(
      "div",
      { class: "row", role: "row", "data-session": key },
      h("span", { class: "name", role: "cell" }, this.link, this.words),
      cell("state"),
      cell("since"),
      cell("cpu", { class: "right", "data-name": "CPU" }),
      cell("memory", { class: "right", "data-name": "memory" }),
      cell("stored", { "data-name": "stored" }),
      cell("more"),
    );
  }

  #set(key, sign, ...content) {
    if (this.#shown[key] === sign) return;
    this.#shown[key] = sign;
    put(this.#cells[key], content);
  }

  /** `ticked`: time has passed, so that ages are different although nothing else is. */
  show(one, store, ticked) {
    const now = [one.body, one.usage, one.newest?.id, one.newest?.count, store.known, store.failed];
    if (!ticked && this.#last?.every((value, i) => value === now[i])) return;
    this.#last = now;
    const words = command(one.command) || (one.state === "stored" ? "" : "–");
    if (this.words.textContent !== words) this.words.textContent = words;
    this.#set("state", JSON.stringify([one.state, one.exit_code, one.exit_signal, one.moved_to, one.home]), pill(one));
    const since = one.since ? age(one.since) : one.home ? `by ${one.home}` : "";
    this.#set("since", since, h("span", { title: one.since && when(one.since) }, since));
    const [cpu, memory] = one.usage ? [percent(one.usage[0]), size(one.usage[1])] : ["", ""];
    this.#set("cpu", cpu, cpu);
    this.#set("memory", memory, memory);
    this.#set("stored", ...(one.host ? ["", ""] : stored(one.newest, store)));
    const elsewhere = one.host ?? (one.home !== this.about.host && one.state !== "stored" && one.home);
    this.#set(
      "more",
      JSON.stringify([elsewhere, one.labels]),
      elsewhere && h("span", { class: "label" }, elsewhere),
      labels(one.labels),
    );
  }
}

/** A sign that changes with the content, and the content. */
function stored(found, { known, failed }) {
  if (!found) {
    const text = failed ? "not known" : known ? "never" : "…";
    return [text, h("span", { class: "quiet" }, text)];
  }
  const facts = `${plural(found.count, "checkpoint")}, ${size(found.bytes.memory)}`;
  const then = age(found.created);
  return [`${then} ${facts}`, h("span", { title: when(found.created) }, then, h("small", {}, ` ${facts}`))];
}
