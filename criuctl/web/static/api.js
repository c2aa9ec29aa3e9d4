// The server: questions, actions, and the list of sessions that it sends by itself.
//
// The token comes in the fragment of the address, which no browser sends anywhere; it is kept for this origin (the port included),
// so that further tabs work, and is worth nothing once the server has ended.

const KEY = "criuctl-token";

export class Failure extends Error {
  constructor(status, error) {
    super(error?.message ?? "the server does not answer");
    this.status = status;
    this.code = error?.code ?? "unreachable";
    this.hint = error?.hint ?? (status === 0 ? "Does `criuctl ui` still run?" : "");
  }
}

/** Take the token out of the address, where it should not stay; a link has the name of its session there as well. */
export function learnToken(text = location.hash) {
  const found = /#token=([\w-]+)(?:&s=([^&]+))?/.exec(text);
  if (!found) return false;
  localStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", `${location.pathname}#/${found[2] ? `s/${found[2]}` : ""}`);
  return true;
}

export const token = () => localStorage.getItem(KEY) ?? "";

export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, {
      ...options,
      headers: { ...options.headers, Authorization: `Bearer ${token()}` },
      cache: "no-store",
    });
  } catch {
    throw new Failure(0);
  }
  let body = null;
  try {
    body = await response.json();
  } catch {
    /* reported below */
  }
  if (!response.ok) throw new Failure(response.status, body?.error ?? { message: `the server answered ${response.status}` });
  return body;
}

export const get = (path) => ask(`/api/${path}`);
export const act = (request) =>
  ask("/api/actions", { method: "POST", body: JSON.stringify(request), headers: { "Content-Type": "application/json" } });
export const named = (name) => encodeURIComponent(name);

/** A WebSocket of this server; the token goes along as a subprotocol, which is in no address and no log. */
export function socket(path) {
  const made = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/${path}`, [
    "criuctl",
    `token.${token()}`,
  ]);
  made.binaryType = "arraybuffer";
  return made;
}

/**
 * The sessions as they change: `sessions`, `connected`, `usage` by name ([processors, bytes, processes]); events "change", "usage",
 * and "locked" when there is another token now.
 */
class Live extends EventTarget {
  sessions = null;
  usage = new Map();
  #byName = new Map();
  connected = false;
  error = null;
  #delay = 500;
  #started = false;

  start() {
    if (!this.#started) this.#connect();
    this.#started = true;
  }

  #connect() {
    const link = socket("live");
    link.addEventListener("open", () => {
      this.#delay = 500;
      this.connected = true;
      this.#tell();
    });
    link.addEventListener("message", (message) => {
      const said = JSON.parse(message.data);
      this.#take(said);
      if (said.usage) this.dispatchEvent(new Event("usage"));
      if (said.sessions || said.changed || said.error) this.#tell();
    });
    link.addEventListener("close", () => {
      if (this.connected) {
        this.connected = false;
        this.#tell();
      }
      setTimeout(() => this.#again(), this.#delay);
      this.#delay = Math.min(this.#delay * 2, 5000);
    });
  }

  /** The whole at first, and then what is different. */
  #take(said) {
    this.error = said.error ?? null;
    if (said.sessions) {
      this.#byName = new Map(said.sessions.map((body) => [body.session, body]));
      this.usage.clear();
    }
    for (const body of said.changed ?? []) this.#byName.set(body.session, body);
    for (const name of said.gone ?? []) this.#byName.delete(name);
    for (const [name, used] of Object.entries(said.usage ?? {})) {
      if (used) this.usage.set(name, used);
      else this.usage.delete(name);
    }
    if (said.sessions || said.changed) this.sessions = [...this.#byName.values()];
  }

  /** A refused WebSocket does not say why; a question does. */
  async #again() {
    try {
      await get("about");
    } catch (error) {
      if (error.status === 401) {
        this.#started = false;
        this.dispatchEvent(new CustomEvent("locked", { detail: error }));
        return;
      }
    }
    this.#connect();
  }

  find(name) {
    return this.#byName.get(name) ?? null;
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}

export const live = new Live();
