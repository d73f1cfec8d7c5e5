// The list of conversations: search, choice, export and import.

import { announce, make } from "./dom.js";
import { matches } from "./conversation.js";
import { asFile, chosenFiles, download, fromFile } from "./exchange.js";

const DAY_MS = 86_400_000;

function age(time) {
  const days = Math.floor((Date.now() - time) / DAY_MS);
  return days < 1 ? new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : days === 1 ? "yesterday" : new Date(time).toLocaleDateString();
}

export function showConversations(list, conversations, current, wanted, onOpen) {
  const found = conversations.filter((one) => !wanted.trim() || matches(one, wanted.trim()));
  list.replaceChildren(...found.map((one) => make("li", {},
    make("button", { type: "button", class: "conversation", "aria-current": one === current ? "true" : null, onclick: () => onOpen(one) },
      make("span", { class: "name" }, one.title || (one.mode === "chat" ? "New chat" : "New completion")), make("span", { class: "muted" }, age(one.updated))))));
  if (!found.length) list.append(make("li", { class: "muted none" }, wanted.trim() ? "No conversation has these words." : "No conversations yet."));
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
