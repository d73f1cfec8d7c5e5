// Makes elements, and explains them: what has `data-about` shows it beside the pointer, and while it has the focus.

"use strict";
const byId = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en-US");
const counted = (value, one, more = `${one}s`) => `${count(value)} ${Math.round(value) === 1 ? one : more}`;
function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name.includes("-") || name === "role" ? node.setAttribute(name, value) : (node[name] = value);
  node.append(...children);
  return node;
}

function drawn(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}


/** Returns a text that is explained; without `about`, the text. */
function explained(text, about) {
  return about ? make("span", { "data-about": about, tabIndex: 0, textContent: text }) : text;
}

const tip = make("div", { id: "tip", role: "tooltip", hidden: true });
let tipOwner = null;

function showTip(owner) {
  if (tipOwner !== owner) tipOwner?.removeAttribute("aria-describedby");
  tipOwner = owner;
  tip.hidden = !owner;
  if (!owner) return;
  if (!tip.isConnected) document.body.append(tip);
  tip.textContent = owner.dataset.about;
  owner.setAttribute("aria-describedby", "tip");
  const box = owner.getBoundingClientRect(), below = box.bottom + 6;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : Math.max(8, box.top - tip.offsetHeight - 6)}px`;
}

const ownerOf = (event) => event.target.closest?.("[data-about]") ?? null;
document.addEventListener("pointerover", (event) => showTip(ownerOf(event) ?? ownerOf({ target: document.activeElement })));
document.addEventListener("focusin", (event) => showTip(ownerOf(event)));
document.addEventListener("focusout", () => showTip(null));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") showTip(null); });
addEventListener("scroll", () => { if (!tip.hidden) showTip(ownerOf({ target: document.activeElement })); }, { capture: true, passive: true });
