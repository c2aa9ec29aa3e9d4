// Sessions of other hosts: their lists while a view shows them, and the page of one such session.

import { get, named } from "./api.js";
import { h, put } from "./dom.js";
import { age, command, when } from "./format.js";
import { labels, pill } from "./parts.js";
import { terminal } from "./terminal.js";

const PERIOD = 3000;

/** The lists: `all` of {host, command, state, error, sessions}; `watch` asks for them until what it returns is called. */
export const others = {
  all: [],
  watch(changed) {
    let over = false,
      timer = null;
    const again = async () => {
      try {
        others.all = await get("hosts");
        if (!over) changed();
      } catch {
        /* what was known stays; the list of this host shows that the server does not answer */
      }
      if (!over) timer = setTimeout(() => (document.hidden ? wait() : again()), PERIOD);
    };
    const wait = () => document.addEventListener("visibilitychange", again, { once: true });
    again();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", again);
    };
  },
};

/** What is to be said of the hosts whose sessions are not there. */
export function hostNotes() {
  return others.all
    .filter((one) => one.state !== "ok")
    .map((one) =>
      h(
        "p",
        { class: "line quiet", "data-host": one.host },
        one.state === "asking" ? `${one.host}: asking…` : `${one.host} cannot be shown: ${one.error.message}. ${one.error.hint}`,
      ),
    );
}

export function remoteView(page, host, name, about) {
  const facts = h("div", { class: "facts" }, h("span", { class: "label" }, host));
  const way = h("code", {});
  const line = h("p", { class: "line quiet" }, "This page shows the terminal of a session on another host. For everything else: ", way);
  const content = h("div", { class: "tab terminal" });
  page.replaceChildren(
    h("div", { class: "heading session" }, h("h1", {}, h("a", { href: "#/", class: "back", "aria-label": "all sessions" }, "‹"), name), facts),
    line,
    content,
  );
  const draw = () => {
    const of = others.all.find((one) => one.host === host);
    const body = of?.sessions.find((one) => one.session === name);
    const missing = !of ? "…" : of.state === "ok" ? "not on that host" : of.state === "asking" ? "asking…" : of.error.message;
    way.textContent = of ? `${of.command} …` : "";
    line.hidden = of?.command === ""; // of a session that another host shares there is nothing else
    put(
      facts,
      h("span", { class: "label" }, host),
      body
        ? [
            pill(body),
            h("span", { title: when(body.since) }, age(body.since)),
            h("code", { title: command(body.command) }, command(body.command)),
            labels(body.labels),
          ]
        : h("span", { class: "quiet" }, missing),
    );
  };
  const unwatch = others.watch(draw);
  const leave = terminal(content, name, about, `hosts/${named(host)}/sessions/${named(name)}/terminal`);
  return () => {
    unwatch();
    leave();
  };
}
