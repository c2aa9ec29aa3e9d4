// A live terminal.  The holder says who writes; this shows it, and fits the terminal to the page only while we do.

import { live, named, socket } from "./api.js";
import { h, toast } from "./dom.js";
import { age } from "./format.js";
import { DARK, LIGHT } from "./palette.js";
import { Terminal } from "./vendor/xterm.mjs";
import { FitAddon } from "./vendor/addon-fit.mjs";
import { widths } from "./widths.js";

const KEYS = [
  ["Esc", "\x1b"],
  ["Tab", "\t"],
  ["Ctrl", null],
  ["^C", "\x03"],
  ["↑", "A"],
  ["↓", "B"],
  ["←", "D"],
  ["→", "C"],
  ["|", "|"],
  ["/", "/"],
  ["-", "-"],
  ["~", "~"],
];
const FAMILY = '"JetBrains Mono", "Cascadia Code", "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace';
const LEAVE = "Ctrl+Shift+↑";
const MOST_TYPED = 1 << 20, // bytes; the server ends the connection for a message of so many
  LINK_ENDED = 1008, // a WebSocket's code for a violated policy
  LEAST_FONT = 6,
  OVER = ["exited", "lost"],
  LIVES = ["running", "paused"];

// One pixel more than the emulator measures: a browser rounds the descent of a font, and underscores may be below that.
const lineHeight = (font) => 1 + 1 / font;

/** `path` is that of the WebSocket when the session is one of another host. */
export function terminal(content, name, about, path = "") {
  const coarse = matchMedia("(pointer: coarse)").matches || matchMedia("(max-width: 640px)").matches;
  let font = Number(localStorage.getItem("criuctl-font")) || (coarse ? 12 : 14);
  const encoder = new TextEncoder();
  const palette = () => (document.documentElement.dataset.theme === "light" ? LIGHT : DARK);
  const screen = new Terminal({
    fontFamily: FAMILY,
    fontSize: font,
    lineHeight: lineHeight(font),
    theme: palette(),
    cursorBlink: true,
    scrollback: 5000,
    convertEol: false,
    disableStdin: about.read_only,
    minimumContrastRatio: 4.5,
    macOptionIsMeta: true,
    allowProposedApi: true, // of `unicode`
  });
  widths(screen);
  const fit = new FitAddon();
  screen.loadAddon(fit);

  const writer = h("span", { class: "writer" });
  const size = h("span", { class: "quiet size" });
  const buttons = h("span", { class: "lease" });
  const banner = h("div", { class: "banner", hidden: true, role: "status" });
  const glass = h("div", { class: "glass" });
  const keys = h("div", { class: "keys", role: "toolbar", "aria-label": "keys" });
  const larger = h("button", { class: "icon", title: "Larger", "aria-label": "larger", onclick: () => zoom(1) }, "A+");
  const smaller = h("button", { class: "icon", title: "Smaller", "aria-label": "smaller", onclick: () => zoom(-1) }, "A−");
  content.replaceChildren(
    h(
      "div",
      { class: "term" },
      h("div", { class: "term-bar" }, writer, buttons, h("span", { class: "grow" }), h("small", { class: "way-out" }, `${LEAVE} leaves`), size, smaller, larger),
      banner,
      glass,
      about.read_only ? "" : keys,
    ),
  );
  screen.open(glass);
  glass.querySelector("textarea")?.setAttribute("aria-label", `type into ${name}; ${LEAVE} leaves the terminal`);
  // Tab belongs to the session's program, so another key has to lead out of the terminal.
  screen.attachCustomKeyEventHandler((event) => {
    if (event.key !== "ArrowUp" || !event.ctrlKey || !event.shiftKey || event.altKey) return true;
    event.preventDefault();
    if (event.type === "keydown") smaller.focus();
    return false;
  });

  // `settled` says why there is no connection any more, "" while there should be one.
  let link = null,
    me = null,
    lease = null,
    theirs = { rows: 24, cols: 80 },
    control = false,
    over = false,
    reach = 1,
    delay = 500,
    timer = null,
    settled = "",
    lastRefusal = 0;
  const mine = () => lease !== null && lease.operator === me;

  function say(text, action) {
    banner.hidden = !text;
    banner.replaceChildren(...(text ? [h("span", {}, text), action ?? ""] : []));
  }

  // -- size: the session's, made to fit, while others write; the page's own while we do ------------

  const draw = (pixels) => Object.assign(screen.options, { fontSize: pixels, lineHeight: lineHeight(pixels) });

  function arrange() {
    if (over || !glass.clientWidth) return;
    if (mine()) {
      draw(font);
      const wanted = fit.proposeDimensions();
      if (!wanted || !Number.isFinite(wanted.cols)) return;
      if (wanted.cols !== screen.cols || wanted.rows !== screen.rows) screen.resize(wanted.cols, wanted.rows);
      if (wanted.cols !== theirs.cols || wanted.rows !== theirs.rows)
        send({ op: "resize", rows: wanted.rows, cols: wanted.cols });
    } else {
      if (screen.cols !== theirs.cols || screen.rows !== theirs.rows) screen.resize(theirs.cols, theirs.rows);
      draw(font);
      const room = fit.proposeDimensions();
      if (room && Number.isFinite(room.cols)) {
        const least = Math.min(room.cols / theirs.cols, coarse ? 1 : room.rows / theirs.rows, 1);
        draw(Math.max(LEAST_FONT, Math.floor(font * least * reach * 10) / 10));
      }
    }
    size.textContent = `${screen.cols}×${screen.rows}`;
  }

  function zoom(by) {
    if (mine()) {
      font = Math.min(28, Math.max(LEAST_FONT, font + by));
      localStorage.setItem("criuctl-font", String(font));
    } else reach = Math.min(4, Math.max(0.5, reach * 1.2 ** by)); // the part outside of the frame can be scrolled to
    arrange();
  }

  // -- who writes ---------------------------------------------------------------------------------

  function drawLease() {
    const who = lease ? `${lease.name}${lease.kind === "human" ? "" : ` (${lease.kind})`}` : "";
    writer.replaceChildren(
      h("i", { class: `dot ${mine() ? "mine" : lease ? "other" : "off"}` }),
      !me
        ? "not connected"
        : about.read_only
          ? lease
            ? `${who} writes`
            : "read-only"
          : mine()
            ? "you write"
            : lease
              ? `${who} writes`
              : coarse
                ? "no writer"
                : "no writer; type to begin",
    );
    buttons.replaceChildren(
      ...(about.read_only || !me
        ? []
        : [
            mine()
              ? h("button", { onclick: () => send({ op: "yield" }) }, "Yield")
              : about.link
                ? "" // typing takes what is free; a link takes nothing from others
                : h("button", { onclick: take }, lease ? "Take over" : "Write"),
          ]),
    );
    content.firstChild?.classList.toggle("mine", mine());
  }

  function take() {
    connect(true);
    screen.focus();
  }

  // -- the connection -----------------------------------------------------------------------------

  function send(message) {
    if (link?.readyState === WebSocket.OPEN) link.send(message instanceof Uint8Array ? message : JSON.stringify(message));
  }

  function connect(taking = false) {
    clearTimeout(timer);
    if (link) {
      link.onclose = null;
      link.onmessage = null;
      link.close();
    }
    settled = "";
    say("connecting…");
    link = socket(`${path || `sessions/${named(name)}/terminal`}${taking ? "?take=1" : ""}`);
    link.onmessage = (message) =>
      typeof message.data === "string" ? hear(JSON.parse(message.data)) : show(new Uint8Array(message.data, 8));
    link.onclose = ({ code }) => {
      me = lease = null;
      drawLease();
      if (code === LINK_ENDED) say((settled = "this link has ended"));
      if (over || settled) return;
      say(`the server does not answer; trying again…`);
      timer = setTimeout(connect, delay);
      delay = Math.min(delay * 2, 5000);
    };
  }

  /** The server sends no more than the screen keeps up with. */
  function show(bytes) {
    const from = link;
    screen.write(bytes, () => {
      if (from === link) send({ op: "shown", bytes: bytes.length });
    });
  }

  function hear(message) {
    if (message.type === "hello") {
      me = message.operator;
      delay = 500;
      state(message.status);
    } else if (message.type === "screen") {
      theirs = { rows: message.rows || 24, cols: message.cols || 80 };
      screen.write("\x1bc", () => {
        if (!over) {
          screen.resize(theirs.cols, theirs.rows);
          arrange();
        }
      });
    } else if (message.type === "attached") {
      lease = message.lease;
      state(message);
      drawLease();
      arrange();
    } else if (message.type === "refused") {
      refused(message.error);
    } else if (message.type === "ended") {
      settled = "ended";
      ended(message.status);
    } else if (message.type === "gone") {
      settled = "gone";
      say(
        [message.error.message, message.error.hint && h("small", {}, ` ${message.error.hint}`)],
        h("button", { onclick: () => connect() }, "Try again"),
      );
    } else if (message.event) happened(message);
  }

  function state(status) {
    if (status.state === "paused") say("paused: it stands still until it is resumed");
    else if (status.state === "checkpointed") say("checkpointed: it goes on here when it is restored");
    else if (!OVER.includes(status.state)) say("");
  }

  function ended(status) {
    const known = status.exit_code !== null && status.exit_code !== undefined;
    const how =
      status.state === "lost"
        ? `lost${status.reason ? `: ${status.reason}` : ""}`
        : `ended${known ? ` with exit code ${status.exit_code}` : ""}`;
    say(status.since ? `${how}, ${age(status.since)}` : how);
    screen.options.cursorBlink = false;
    lease = null;
    me = null;
    drawLease();
  }

  function happened(event) {
    switch (event.event) {
      case "lease":
        lease = event.lease;
        drawLease();
        arrange();
        break;
      case "resize":
        theirs = { rows: event.rows, cols: event.cols };
        if (!mine()) screen.write("", arrange);
        break;
      case "paused":
      case "halted":
        say(`${event.event} by ${event.by?.name ?? event.by ?? "an unknown operator"}: it stands still until it is resumed`);
        break;
      case "resumed":
        say("");
        break;
      case "checkpoint-begin":
        say("a checkpoint is being made…");
        break;
      case "checkpoint":
      case "checkpoint-aborted":
        say("");
        break;
      case "checkpointed":
        say("checkpointed: it goes on here when it is restored");
        break;
      case "restored":
        say("");
        toast(`${name} is restored, incarnation ${event.incarnation}`, "good");
        arrange();
        break;
      case "moved":
        say(`moved to ${event.host}`, h("code", {}, `criuctl attach ${event.to}`));
        break;
      case "fenced":
        say(`${event.reason}; this copy of it is stopped`);
        break;
      case "exit":
        ended({ state: event.exit_code === null ? "lost" : "exited", exit_code: event.exit_code });
        settled = "ended";
        break;
    }
  }

  function refused(error) {
    if (Date.now() - lastRefusal < 1500) return;
    lastRefusal = Date.now();
    const held = error.code === "lease-held";
    toast(`not typed: ${error.message}${held ? " – Take over, or wait until it is free" : ""}`, "warning");
    if (held) buttons.firstChild?.classList.add("hint");
  }

  // -- typing -------------------------------------------------------------------------------------

  function type(text) {
    if (about.read_only || settled) return;
    if (control && text.length === 1) {
      const code = text.toUpperCase().charCodeAt(0);
      if (code >= 63 && code <= 95) text = code === 63 ? "\x7f" : String.fromCharCode(code & 31);
      hold(false);
    }
    const bytes = encoder.encode(text);
    if (bytes.length < MOST_TYPED) send(bytes);
    else toast("not typed: that is too much at once; a file goes in by criuctl send --paste", "warning");
  }

  function hold(on) {
    control = on;
    keys.querySelector("[data-key=Ctrl]")?.setAttribute("aria-pressed", String(on));
  }

  for (const [label, text] of KEYS) {
    const key = h("button", { "data-key": label, "aria-pressed": label === "Ctrl" ? "false" : null }, label);
    // The terminal keeps the focus, and with it the phone its keyboard.
    key.addEventListener("pointerdown", (event) => event.preventDefault());
    key.addEventListener("click", () => {
      if (label === "Ctrl") hold(!control);
      else if ("ABCD".includes(text)) type(`\x1b${screen.modes.applicationCursorKeysMode ? "O" : "["}${text}`);
      else type(text);
      screen.focus();
    });
    keys.append(key);
  }
  screen.onData(type);
  screen.onBinary((text) => {
    if (!about.read_only) send(Uint8Array.from(text, (letter) => letter.charCodeAt(0)));
  });

  // -- while it is shown --------------------------------------------------------------------------

  // The page is as tall as what is left of the window, also above a phone's keyboard.
  const measure = () => {
    const view = window.visualViewport;
    const height = view ? view.height : window.innerHeight;
    content.style.setProperty(
      "--room",
      `${Math.max(160, Math.floor(height - content.getBoundingClientRect().top - window.scrollY))}px`,
    );
    requestAnimationFrame(arrange);
  };
  const watch = new ResizeObserver(() => requestAnimationFrame(arrange));
  watch.observe(glass);
  const above = new ResizeObserver(measure); // the heading gets its buttons when the list of sessions comes
  for (const part of content.parentElement.children) if (part !== content) above.observe(part);
  const recolour = () => {
    screen.options.theme = palette();
  };
  const changed = () => {
    const body = path ? null : live.find(name);
    if (settled && body?.holder && LIVES.includes(body.state)) connect();
  };
  window.addEventListener("resize", measure);
  window.visualViewport?.addEventListener("resize", measure);
  window.addEventListener("theme", recolour);
  live.addEventListener("change", changed);
  measure();
  drawLease();
  connect();
  if (!coarse) screen.focus();
  return () => {
    over = true;
    clearTimeout(timer);
    watch.disconnect();
    above.disconnect();
    window.removeEventListener("resize", measure);
    window.visualViewport?.removeEventListener("resize", measure);
    window.removeEventListener("theme", recolour);
    live.removeEventListener("change", changed);
    if (link) {
      link.onclose = null;
      link.close();
    }
    screen.dispose();
  };
}
