// Making elements.  Text is always text: nothing that a session or a checkpoint says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An element with attributes (`onclick` and the like are listeners) and children: elements, texts, arrays of them. */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Put children, as of `h`, in the place of what an element holds. */
export function put(element, ...children) {
  element.replaceChildren();
  return fill(element, {}, children);
}

/** As `h`, in SVG. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** A table in a frame that keys scroll, of `columns` ({name, right?, mono?, minor?}) and rows of cells; rows that lead somewhere have `href`. */
export function table(columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const kind = (column) =>
    [column.right && "right", column.mono && "mono", column.minor && "minor"].filter(Boolean).join(" ") || null;
  const head = h(
    "tr",
    {},
    columns.map((column) => h("th", { class: kind(column), scope: "col" }, column.name)),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((cell, i) => h("td", { class: kind(columns[i]), "data-name": columns[i].name }, cell)),
    ),
  );
  return h("div", { class: "scroll", role: "group", tabindex: 0, "aria-label": columns[0].name }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

/** A message that goes away by itself. */
export function toast(text, level = "info") {
  const shown = h("div", { class: `toast ${level}` }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), level === "error" ? 9000 : 5000);
}

/** What went wrong, in the place of what could not be shown. */
export function trouble(error, again) {
  return h(
    "div",
    { class: "trouble", role: "alert" },
    h("strong", {}, error.message || String(error)),
    error.hint && h("p", {}, error.hint),
    again && h("button", { onclick: again }, "Try again"),
  );
}

/** Ask before something is done: null, or the values of `fields` ({name, label, value?, required?}). What ends something is not preset. */
export function confirm({ title, text, action, danger, fields = [] }) {
  return new Promise((answer) => {
    const inputs = fields.map((field) =>
      h("input", { name: field.name, value: field.value, required: field.required, autocomplete: "off", spellcheck: "false", autofocus: true }),
    );
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "question" }, title),
      h("p", {}, text),
      inputs.map((input, i) => h("label", {}, fields[i].label, input)),
      h(
        "div",
        { class: "buttons" },
        h("button", { type: "button", onclick: () => dialog.close(), autofocus: Boolean(danger) }, "Cancel"),
        h("button", { value: "yes", class: danger ? "danger" : "primary", autofocus: !danger && !fields.length }, action),
      ),
    );
    const dialog = h("dialog", { class: "confirm", "aria-labelledby": "question" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      answer(dialog.returnValue === "yes" ? Object.fromEntries(inputs.map((input) => [input.name, input.value.trim()])) : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
