// The list of conversations: search, choice, names, export and import.

import { announce, button, make } from "./dom.js";
import { matches } from "./conversation.js";
import { asFile, chosenFiles, download, fromFile } from "./exchange.js";

const DAY_MS = 86_400_000;

function age(time) {
  const days = Math.floor((Date.now() - time) / DAY_MS);
  return days < 1 ? new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : days === 1 ? "yesterday" : new Date(time).toLocaleDateString();
}

export const titleOf = (conversation) => conversation.title || (conversation.mode === "chat" ? "New chat" : "New completion");

/** Shows the conversations that have the words of `wanted`. `actions`: open, rename(conversation, title), remove. */
export function showConversations(list, conversations, current, wanted, actions) {
  if (list.querySelector("input")) return; // a name is being written
  const focused = document.activeElement, place = list.contains(focused) ? [focused.closest("li").id, focused.className] : null;
  const found = conversations.filter((one) => !wanted.trim() || matches(one, wanted.trim()));
  list.replaceChildren(...found.map((one) => row(one, one === current, actions)));
  if (!found.length) list.append(make("li", { class: "muted none" }, wanted.trim() ? "No conversation has these words." : "No conversations yet."));
  if (place) document.getElementById(place[0])?.getElementsByClassName(place[1])[0]?.focus();
}

function row(one, isCurrent, actions) {
  const name = titleOf(one);
  const opener = button("", () => actions.open(one), { class: "conversation", "aria-current": isCurrent ? "true" : null });
  opener.append(make("span", { class: "name" }, name), make("span", { class: "muted" }, age(one.updated)));
  const element = make("li", { id: `conversation-${one.id}` }, opener,
    button("✎", () => rename(element, one, actions), { class: "icon rename", "aria-label": `Rename ${name}`, title: "Rename" }),
    button("×", () => actions.remove(one), { class: "icon remove", "aria-label": `Delete ${name}`, title: "Delete" }));
  return element;
}

/** Puts a field in place of a row, which Enter and leaving it keep, and Escape does not. */
function rename(element, one, actions) {
  const field = make("input", { type: "text", "aria-label": "Name of the conversation", value: titleOf(one), maxlength: 200 });
  let isDone = false;
  const finish = (isKept, hadFocus) => {
    if (isDone) return;
    isDone = true;
    const title = field.value.trim();
    field.remove();
    actions.rename(one, isKept && title ? title : one.title);
    if (hadFocus) document.getElementById(element.id)?.querySelector(".conversation").focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) finish(true, true);
    if (event.key === "Escape") { event.stopPropagation(); finish(false, true); }
  });
  field.addEventListener("blur", () => finish(true, false));
  element.replaceChildren(field);
  field.select();
}

export function exportConversations(conversations) {
  const name = conversations.length === 1 ? (conversations[0].title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) : "conversations";
  download(`${name}.json`, asFile(conversations));
}

/** Reads files that the user chooses, and hands their conversations to `onFound`. */
export async function importConversations(onFound) {
  for (const file of await chosenFiles("application/json,.json")) {
    try {
      onFound(fromFile(await file.text()));
    } catch (error) {
      announce(error.message);
    }
  }
}
