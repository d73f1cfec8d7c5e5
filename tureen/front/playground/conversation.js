// A conversation is a tree: an edited or regenerated turn is a sibling of the one before it, and nothing is lost.
//
// conversation: {id, title, mode: "chat" | "completion", system, tools, toolChoice, model, settings, nodes, selected, updated}
// node: {id, parent, role: "user" | "assistant" | "tool", text, …}; `selected` has the child that is shown of each node.
// What an assistant's node has beside that is written by answer.js.

import { randomName } from "./api.js";

const TITLE_CHARS = 60, FIRST_SETTINGS = { max_new_tokens: 512 };

export function create(fields = {}) {
  return { version: 1, id: randomName(), title: "", mode: "chat", system: "", tools: "", toolChoice: "auto", model: "", settings: { ...FIRST_SETTINGS }, nodes: {}, selected: {}, updated: Date.now(), ...fields };
}

/** Adds a node below `parent` (null: at the top) and shows it. */
export function add(conversation, parent, fields) {
  const node = { id: randomName(), parent: parent ? parent.id : null, text: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.selected[node.parent ?? ""] = node.id;
  if (!conversation.title && node.role === "user") conversation.title = node.text.trim().slice(0, TITLE_CHARS) || "Picture";
  return node;
}

export const parentOf = (conversation, node) => (node.parent === null ? null : conversation.nodes[node.parent]);

export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((one) => one.parent === node.parent);
}

export function select(conversation, node) {
  conversation.selected[node.parent ?? ""] = node.id;
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

/** Returns the messages of a chat, as OpenAI's API takes them. */
export function messages(nodes, system) {
  const made = nodes.map((node) => {
    if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.text };
    if (node.role === "assistant") {
      return { role: "assistant", content: node.text, ...(node.calls?.length ? { tool_calls: node.calls.map(asSent) } : {}) };
    }
    const pictures = (node.pictures || []).map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: pictures.length ? [...pictures, { type: "text", text: node.text }] : node.text };
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
