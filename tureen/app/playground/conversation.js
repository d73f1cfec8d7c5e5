// A conversation is a tree: an edited or regenerated turn is a sibling of the one before it, and nothing is lost.
//
// conversation: {id, title, mode: "chat" | "completion", system, tools, toolChoice, model, settings, nodes, selected,
//   from, draft, updated}; `from` is the id of the first node that is sent ("" = all), `draft` null or {text, pictures,
//   files}: what is written and not sent.
// node: {id, parent, role: "user" | "assistant" | "tool", text, …}; `selected` has the child that is shown of each node.
// A user's node may have pictures (data URLs) and files [{name, text}].
// What an assistant's node has beside that is written by answer.js.

import { randomName } from "./api.js";

const TITLE_CHARS = 60, FIRST_SETTINGS = { max_new_tokens: 512 };

export function create(fields = {}) {
  return { version: 1, id: randomName(), title: "", mode: "chat", system: "", tools: "", toolChoice: "auto", model: "", settings: { ...FIRST_SETTINGS }, nodes: {}, selected: {}, from: "", draft: null, updated: Date.now(), ...fields };
}

/** Adds a node below `parent` (null: at the top) and shows it. */
export function add(conversation, parent, fields) {
  const node = { id: randomName(), parent: parent ? parent.id : null, text: "", ...fields };
  conversation.nodes[node.id] = node;
  select(conversation, node);
  if (!conversation.title && node.role === "user") conversation.title = node.text.trim().slice(0, TITLE_CHARS) || node.files?.[0].name || "Picture";
  return node;
}

export const parentOf = (conversation, node) => (node.parent === null ? null : conversation.nodes[node.parent]);

export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((one) => one.parent === node.parent);
}

/** Shows a node, of those with the same parent. If one of them is the first that is sent, it is that now. */
export function select(conversation, node) {
  conversation.selected[node.parent ?? ""] = node.id;
  if (conversation.nodes[conversation.from]?.parent === node.parent) conversation.from = node.id;
}

/** Says of answers that were still coming when the page went that they were stopped. */
export function settleAll(conversation) {
  for (const node of Object.values(conversation.nodes)) if (["waiting", "running", "lost"].includes(node.state)) node.state = "stopped";
}

/** Returns the nodes that are shown, from the first to the last. */
export function shown(conversation) {
  const found = [];
  for (let id = conversation.selected[""]; id; id = conversation.selected[id]) found.push(conversation.nodes[id]);
  return found;
}

/** Returns the nodes that lead to `node`, itself left out. */
export function before(conversation, node) {
  const found = [];
  for (let one = parentOf(conversation, node); one; one = parentOf(conversation, one)) found.unshift(one);
  return found;
}

/** Returns those of `nodes` that are sent: from the one with the id `from` on; all, if it is not among them. */
export function sent(nodes, from) {
  return nodes.slice(Math.max(0, nodes.findIndex((node) => node.id === from)));
}

/** Returns the nodes that an answer is made from. */
export const sentBefore = (conversation, node) => sent(before(conversation, node), node.made.from);

/** Returns whether a conversation has nothing to keep: no turn and no draft. */
export function isBlank({ nodes, draft }) {
  return !Object.keys(nodes).length && !(draft && (draft.text || draft.pictures.length || draft.files.length));
}

/** Returns a file as a block of Markdown; its fence is longer than any in it. */
function fenced({ name, text }) {
  const fence = "`".repeat((text.match(/`+/g) || []).reduce((most, run) => Math.max(most, run.length + 1), 3));
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Returns what a turn says: its files, then its text. */
export const said = (node) => [...(node.files || []).map(fenced), node.text].filter(Boolean).join("\n\n");

/** Returns the messages of a chat, as OpenAI's API takes them. */
export function messages(nodes, system) {
  const made = nodes.map((node) => {
    if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.text };
    if (node.role === "assistant") {
      return { role: "assistant", content: node.text, ...(node.calls?.length ? { tool_calls: node.calls.map(asSent) } : {}) };
    }
    const pictures = (node.pictures || []).map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: pictures.length ? [...pictures, { type: "text", text: said(node) }] : said(node) };
  });
  return system ? [{ role: "system", content: system }, ...made] : made;
}

const asSent = (call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" } });

/** Returns the prompt of a completion: all that is there so far. */
export const prompt = (nodes) => nodes.map((node) => node.text).join("");

export const hasPictures = (nodes) => nodes.some((node) => node.pictures?.length);

/** Returns whether a conversation has all words of a search. */
export function matches(conversation, wanted) {
  const text = [conversation.title, conversation.system, ...Object.values(conversation.nodes).map((node) => node.text)].join("\n").toLowerCase();
  return wanted.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
