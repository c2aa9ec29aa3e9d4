// The page: its bar, and which view the address names.  Views are functions that fill an element and return how to leave it.

import { get, learnToken, live } from "./api.js";
import { h, put, toast, trouble } from "./dom.js";
import { until } from "./format.js";
import { checkpointView } from "./checkpoint.js";
import { compareView } from "./compare.js";
import { eventsView } from "./events.js";
import { remoteView } from "./hosts.js";
import { LINKED, sessionView } from "./session.js";
import { sessionsView } from "./sessions.js";

const page = document.getElementById("page");
const bar = document.getElementById("bar");
const limits = document.getElementById("limits");
let leave = null;

function theme(next) {
  const root = document.documentElement;
  const chosen =
    next ?? localStorage.getItem("criuctl-theme") ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
  if (next) localStorage.setItem("criuctl-theme", next);
  root.dataset.theme = chosen;
  window.dispatchEvent(new CustomEvent("theme", { detail: chosen }));
}

let watching = null;

function drawBar(about) {
  const dot = h("span", { class: "dot", title: "live" });
  const update = () => {
    dot.classList.toggle("off", !live.connected);
    dot.title = live.connected ? "live" : "the server does not answer";
  };
  live.removeEventListener("change", watching);
  live.addEventListener("change", (watching = update));
  update();
  put(
    bar,
    h(
      "a",
      { class: "home", href: "#/" },
      h("img", { src: "/static/icon.svg", alt: "", width: 22, height: 22 }),
      h("b", {}, "criuctl"),
    ),
    h("span", { class: "host" }, dot, about.host),
    about.read_only && h("span", { class: "badge" }, "read-only"),
    about.link
      ? h("span", { class: "until" }, `until ${until(about.link.expires)}`)
      : h("a", { class: "events", href: "#/events" }, "Events"),
    h("span", { class: "store", title: "the store of checkpoints" }, about.store ?? ""),
    h(
      "button",
      {
        class: "icon",
        title: "Dark or light",
        "aria-label": "Dark or light",
        onclick: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
      },
      "◐",
    ),
  );
}

function askForToken(error) {
  const field = h("input", {
    type: "password",
    placeholder: "the address, or what stands behind token=",
    autocomplete: "off",
    "aria-label": "token",
  });
  const form = h(
    "form",
    { class: "card token" },
    h("h1", {}, "criuctl"),
    h("p", {}, error.message, ". ", error.hint),
    field,
    h("button", { class: "primary" }, "Open"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = field.value.trim();
    if (learnToken(given.includes("#token=") ? given.slice(given.indexOf("#")) : `#token=${given}`)) start();
    else toast("that is no token", "error");
  });
  page.replaceChildren(form);
  field.focus();
}

/** What was encoded for the address; what was typed there may be no encoding of anything. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function route(about) {
  const leaving = leave !== null;
  leave?.();
  leave = null;
  let [kind, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  if (about.link) [kind, rest] = ["s", [about.link.session, LINKED.includes(rest[1]) ? rest[1] : LINKED[0]]]; // there is nothing else to see
  window.scrollTo(0, 0);
  document.body.dataset.view = kind || "sessions";
  document.title = [kind === "s" ? rest[0] : kind === "h" ? rest[1] : { c: "checkpoint", d: "compare" }[kind] ?? kind, "criuctl"].filter(Boolean).join(" · ");
  if (leaving) page.focus({ preventScroll: true }); // what had the focus is gone; keys go on at the view
  if (kind === "s" && rest[0]) leave = sessionView(page, rest[0], rest[1], about);
  else if (kind === "h" && about.hosts?.includes(rest[0]) && rest[1]) leave = remoteView(page, rest[0], rest[1], about);
  else if (kind === "c" && rest[0]) leave = checkpointView(page, rest[0], about);
  else if (kind === "d" && rest[1]) leave = compareView(page, rest[0], rest[1]);
  else if (kind === "events") leave = eventsView(page);
  else leave = sessionsView(page, about);
}

let started = false;

async function start() {
  let about;
  try {
    about = await get("about");
  } catch (error) {
    if (error.status === 401) askForToken(error);
    else page.replaceChildren(trouble(error, start));
    return;
  }
  drawBar(about);
  limits.replaceChildren(...(about.limits ?? []).map((text) => h("p", {}, text)));
  live.start();
  if (!started) {
    started = true;
    live.addEventListener("locked", (event) => {
      leave?.();
      leave = null;
      askForToken(event.detail);
    });
    window.addEventListener("hashchange", () => {
      if (learnToken()) location.reload();
      else route(about);
    });
  }
  route(about);
}

window.addEventListener("unhandledrejection", (event) => toast(String(event.reason?.message ?? event.reason), "error"));
theme();
learnToken();
start();
