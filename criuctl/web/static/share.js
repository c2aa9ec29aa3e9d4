// Links for others to the terminal of one session: made, copied once, and revoked.

import { ask, get, named } from "./api.js";
import { h, put, toast } from "./dom.js";
import { when } from "./format.js";

const ROLES = { observe: "may look", write: "may look and type" };
const TIMES = { 3600: "1 hour", 28800: "8 hours", 86400: "1 day", 604800: "7 days" };

export function shareButton(name) {
  return h("button", { "data-action": "share", onclick: () => share(name) }, "Share");
}

function share(name) {
  const options = (found) => Object.entries(found).map(([value, text]) => h("option", { value }, text));
  const role = h("select", { name: "role" }, options(ROLES));
  const seconds = h("select", { name: "seconds" }, options(TIMES));
  const made = h("div", { class: "made" });
  const known = h("ul", { class: "links" });
  const dialog = h(
    "dialog",
    { class: "share", "aria-labelledby": "share" },
    h("h2", { id: "share" }, `Share ${name}`),
    h("p", {}, `A link to the terminal and the processes of ${name}, and to nothing else. It ends with this server at the latest.`),
    h("label", {}, "Who has it", role),
    h("label", {}, "For", seconds),
    made,
    known,
    h(
      "div",
      { class: "buttons" },
      h("button", { onclick: () => dialog.close() }, "Close"),
      h("button", { class: "primary", "data-action": "link", onclick: () => tried(make) }, "Make a link"),
    ),
  );
  const tried = (work) => work().catch((error) => toast(error.hint ? `${error.message} (${error.hint})` : error.message, "error"));

  async function make() {
    const body = JSON.stringify({ session: name, role: role.value, seconds: Number(seconds.value) });
    const link = await ask("/api/links", { method: "POST", body });
    const url = `${location.origin}/#token=${link.token}&s=${named(name)}`;
    const field = h("input", { readonly: true, value: url, "aria-label": "the link", onfocus: () => field.select() });
    const copy = h("button", { onclick: () => navigator.clipboard?.writeText(url).then(() => toast("copied", "good")) }, "Copy");
    put(made, h("p", {}, "It is shown now, and not again:"), h("div", { class: "copy" }, field, copy));
    field.focus();
    await list();
  }

  async function list() {
    const found = (await get("links")).filter((link) => link.session === name);
    put(
      known,
      found.map((link) => {
        const end = () => ask(`/api/links/${link.id}`, { method: "DELETE" }).then(list);
        const text = h("span", { class: "grow" }, `link-${link.id} ${ROLES[link.role]}, until ${when(link.expires)}`);
        return h("li", {}, text, h("button", { class: "danger", onclick: () => tried(end) }, "Revoke"));
      }),
    );
  }

  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  tried(list);
}
