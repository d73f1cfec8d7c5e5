// How much of the model's context a conversation takes, and which turns to leave out when it is too long.

import { byId } from "./dom.js";
import { said, sent } from "./conversation.js";

const CHARS_PER_TOKEN = 4, KEPT_SHARE = 0.5, FULL_SHARE = 0.9;

const size = (node) => said(node).length;
const total = (nodes) => nodes.reduce((sum, node) => sum + size(node), 0);

/** Returns {used, isEstimate}: the tokens of the turns that are sent, counted by the server up to the last answer. */
export function contextUse(nodes, from, draft = "") {
  const kept = sent(nodes, from);
  const place = kept.findLastIndex((node) => node.figures?.prompt !== undefined && (node.made.from ?? "") === from);
  const { prompt = 0, completion = 0 } = place < 0 ? {} : kept[place].figures;
  const rest = total(kept.slice(place + 1)) + draft.length;
  return { used: prompt + completion + Math.ceil(rest / CHARS_PER_TOKEN), isEstimate: rest > 0 };
}

/** Returns the user's turn to begin with, so that the rest takes half of `length`; null if none can be left out. */
export function dropPoint(nodes, from, used, length) {
  const kept = sent(nodes, from), perChar = used / Math.max(1, total(kept));
  const turns = kept.map((node, index) => [node, index]).filter(([node, index]) => index && node.role === "user");
  const found = turns.find(([, index]) => perChar * total(kept.slice(index)) <= length * KEPT_SHARE) ?? turns.at(-1);
  return found ? found[0] : null;
}

/** Shows the meter. `length`: of the context; 0 = not known. Returns the turn that its button would begin with; null for none. */
export function showContext(conversation, nodes, draft, length) {
  const from = conversation.from ?? "", { used, isEstimate } = contextUse(nodes, from, draft);
  byId("context").hidden = !length || !nodes.length;
  byId("context-text").textContent = `${isEstimate ? "about " : ""}${used.toLocaleString("en-US")} of ${length.toLocaleString("en-US")} tokens`;
  Object.assign(byId("context-meter"), { max: length || 1, high: length * FULL_SHARE, value: used });
  const isFull = length && used + (conversation.settings.max_new_tokens ?? 0) > length || used > length * FULL_SHARE;
  const point = isFull ? dropPoint(nodes, from, used, length) : null;
  byId("drop").hidden = !point;
  return point;
}
