// All sessions: their state as it changes, and when each was stored last.

import { get, live, named } from "./api.js";
import { h, trouble } from "./dom.js";
import { age, command, plural, size, when } from "./format.js";
import { labels, pill } from "./parts.js";

const ORDER = ["running", "paused", "checkpointed", "lost", "exited"];
const ALSO_LIVE = new Set(["running", "paused"]);

export function sessionsView(page, about) {
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter", oninput: () => draw() });
  const counts = h("div", { class: "counts" });
  const list = h("div", { class: "sessions" });
  const notice = h("div", {});
  const below = h("div", {});
  let newest = null,
    failure = null,
    known = "";
  page.replaceChildren(h("div", { class: "heading" }, h("h1", {}, "Sessions"), counts, filter), notice, list, below);

  async function ask() {
    try {
      newest = await get("newest");
      failure = null;
    } catch (error) {
      failure = error;
    }
    draw();
  }

  function matches(name, body) {
    const wanted = filter.value.trim().toLowerCase();
    return (
      !wanted ||
      `${name} ${body.state ?? ""} ${command(body.command)} ${Object.entries(body.labels ?? {}).join(" ")}`
        .toLowerCase()
        .includes(wanted)
    );
  }

  function stored(name) {
    const found = newest?.[name];
    if (found) {
      return h(
        "span",
        { title: when(found.created) },
        age(found.created),
        h("small", {}, ` ${plural(found.count, "checkpoint")}, ${size(found.bytes.memory)}`),
      );
    }
    return h("span", { class: "quiet" }, failure ? "not known" : newest ? "never" : "…");
  }

  function row(body) {
    return h(
      "a",
      { class: "row", href: `#/s/${named(body.session)}`, "data-session": body.session },
      h("span", { class: "name" }, h("b", {}, body.session), h("code", {}, command(body.command) || "–")),
      h("span", { class: "state" }, pill(body)),
      h("span", { class: "since", title: when(body.since) }, age(body.since)),
      h("span", { class: "stored", "data-name": "stored" }, stored(body.session)),
      h("span", { class: "more" }, body.home !== about.host && h("span", { class: "label" }, body.home), labels(body.labels)),
    );
  }

  function draw() {
    const all = live.sessions;
    notice.replaceChildren(failure ? trouble({ message: `The store: ${failure.message}`, hint: failure.hint }, ask) : "");
    if (!all) {
      list.replaceChildren(live.error ? trouble(live.error) : h("p", { class: "empty" }, "asking…"));
      return;
    }
    counts.replaceChildren(
      ...ORDER.map((state) => [state, all.filter((body) => body.state === state).length])
        .filter(([, count]) => count)
        .map(([state, count]) => h("span", { class: `count ${state}` }, h("b", {}, count), ` ${state}`)),
    );
    const shown = all
      .filter((body) => matches(body.session, body))
      .sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.session.localeCompare(b.session));
    const heads = h(
      "div",
      { class: "row head" },
      ["Session", "State", "Since", "Last checkpoint", ""].map((text) => h("span", {}, text)),
    );
    const drawn = h(
      "div",
      { class: "sessions" },
      shown.length
        ? [heads, shown.map(row)]
        : h(
            "p",
            { class: "empty" },
            all.length
              ? "no session fits"
              : ["no sessions on this host; ", h("code", {}, "criuctl run --name work -- bash"), " starts one"],
          ),
    );
    // What is the same stays: a row that is replaced while it is being clicked is not clicked.
    if (!drawn.isEqualNode(list)) list.replaceChildren(...drawn.childNodes);
    const here = new Set(all.map((body) => body.session));
    const others = Object.entries(newest ?? {}).filter(([name, body]) => !here.has(name) && matches(name, body));
    below.replaceChildren(
      others.length
        ? h(
            "section",
            {},
            h("h2", {}, "In the store only"),
            h(
              "div",
              { class: "sessions" },
              others.map(([name, body]) =>
                h(
                  "a",
                  { class: "row", href: `#/s/${named(name)}/checkpoints` },
                  h("span", { class: "name" }, h("b", {}, name)),
                  h("span", { class: "state" }, h("span", { class: "pill checkpointed" }, "stored")),
                  h("span", { class: "since" }, h("small", {}, `by ${body.host}`)),
                  h("span", { class: "stored", "data-name": "stored" }, stored(name)),
                  h("span", { class: "more" }, labels(body.labels)),
                ),
              ),
            ),
          )
        : "",
    );
  }

  const changed = () => {
    const now = JSON.stringify(live.sessions?.map((body) => [body.session, body.checkpoint, ALSO_LIVE.has(body.state)]));
    if (now !== known) {
      known = now;
      ask();
    }
    draw();
  };
  live.addEventListener("change", changed);
  const clock = setInterval(draw, 15000);
  const asking = setInterval(ask, 60000);
  if (live.sessions) changed();
  else {
    draw();
    ask();
  }
  return () => {
    live.removeEventListener("change", changed);
    clearInterval(clock);
    clearInterval(asking);
  };
}
