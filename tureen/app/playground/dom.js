// Makes elements. Text is always a text node: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** Returns an element. `on…` are listeners, `data` its dataset, null and false leave an attribute out. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value") node.value = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(text, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, text);
}

/** Opens a dialog that is removed when it closes. Returns it. */
export function dialog(title, ...children) {
  const heading = make("h2", { id: "dialog-title" }, title);
  const close = button("×", () => node.close(), { class: "icon close", "aria-label": "Close" });
  const node = make("dialog", { "aria-labelledby": "dialog-title" }, make("div", { class: "dialog-head" }, heading, close), ...children);
  node.addEventListener("close", () => node.remove());
  node.addEventListener("click", (event) => { if (event.target === node) node.close(); });
  document.body.append(node);
  node.showModal();
  return node;
}

/** Says something to screen readers, and shows it for a while. */
export function announce(text, { shown = true } = {}) {
  byId("announcer").textContent = text;
  if (!shown) return;
  const note = make("div", { class: "toast" }, text);
  byId("toasts").replaceChildren(note);
  setTimeout(() => note.remove(), 5000);
}

export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied");
  } catch {
    const area = make("textarea", { readonly: true, rows: 8, "aria-label": "Text to copy", value: text });
    dialog("Copy this", area);
    area.select();
  }
}

/** Lets Left, Right, Home and End move among tabs, as WAI-ARIA's authoring practices have it. */
export function tabs(list, onSelect) {
  const all = () => [...list.querySelectorAll("[role=tab]")];
  const select = (tab, { focus = false } = {}) => {
    for (const one of all()) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
    }
    if (focus) tab.focus();
    onSelect(tab);
  };
  list.addEventListener("click", (event) => { const tab = event.target.closest("[role=tab]"); if (tab) select(tab); });
  list.addEventListener("keydown", (event) => {
    const found = all(), index = found.indexOf(document.activeElement);
    const target = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: found.length - 1 }[event.key];
    if (index < 0 || target === undefined) return;
    event.preventDefault();
    select(found[(target + found.length) % found.length], { focus: true });
  });
  return select;
}

const DIRECTIONS = /[\u202a-\u202e\u2066-\u2069]/g;

/** Returns a text in which characters that turn the direction of writing are names: they could hide what follows. */
export function visible(text) {
  return text.replace(DIRECTIONS, (one) => `‹U+${one.codePointAt(0).toString(16).toUpperCase()}›`);
}
