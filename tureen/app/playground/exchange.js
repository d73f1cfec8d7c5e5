// Writes conversations to a file and reads them back.

import { create, settleAll } from "./conversation.js";
import { make } from "./dom.js";
import { randomName } from "./api.js";

const FORM = "tureen-conversations";
const ROLES = ["user", "assistant", "tool"];

export function asFile(conversations) {
  return JSON.stringify({ form: FORM, version: 1, conversations }, null, 1);
}

/** Returns the conversations of a file's text, each with a new id. Throws Error that says what is wrong. */
export function fromFile(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new Error(`This file is not JSON: ${error.message}`);
  }
  if (read?.form !== FORM || !Array.isArray(read.conversations)) throw new Error("This file contains no playground conversations.");
  return read.conversations.map((one, index) => checked(one, index));
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => value === undefined || typeof value === "string";
const haveText = (list) => Array.isArray(list) && list.every((one) => isObject(one) && typeof one.text === "string");

function checked(one, index) {
  const where = `conversation ${index + 1}`;
  const refuse = (why) => { throw new Error(`${where} ${why}`); };
  if (!isObject(one?.nodes) || !isObject(one.selected) || !(one.settings === undefined || isObject(one.settings)) || !["title", "system", "tools", "toolChoice", "model", "from"].every((name) => isText(one[name]))) refuse("is damaged: a field is missing or of the wrong kind.");
  for (const [id, node] of Object.entries(one.nodes)) {
    if (!ROLES.includes(node?.role) || typeof node.text !== "string" || node.id !== id || id in {} || (node.parent !== null && !Object.hasOwn(one.nodes, node.parent))) refuse("is damaged: a turn has no role, no text or no place.");
    if (!Array.isArray(node.pictures ?? []) || (node.pictures ?? []).some((url) => !String(url).startsWith("data:image/"))) refuse("has a picture that is not in the file.");
    if (!isFileList(node.files ?? [])) refuse("is damaged: an attached file has no name or no text.");
    if (node.role === "assistant" && !isAnswer(node)) refuse("is damaged: an answer does not say how it was made.");
  }
  if (!isTree(one.nodes)) refuse("is damaged: a turn comes before itself.");
  if (Object.entries(one.selected).some(([parent, id]) => !Object.hasOwn(one.nodes, id) || one.nodes[id].parent !== (parent || null))) refuse("is damaged: a turn that it shows is missing or elsewhere.");
  settleAll(one);
  return create({ ...one, id: randomName(), draft: null, mode: one.mode === "completion" ? "completion" : "chat", updated: Date.now() });
}

const isFileList = (files) => haveText(files) && files.every((file) => typeof file.name === "string");

function isAnswer({ made, figures, calls, tokens, reasoning, error, state }) {
  return isObject(made) && isObject(made.settings) && haveText(made.kept) && ["model", "system", "tools", "toolChoice", "keptText", "from"].every((name) => isText(made[name]))
    && isObject(figures) && Object.values(figures).every((value) => typeof value === "number")
    && Array.isArray(calls) && calls.every((call) => isObject(call) && isText(call.id) && typeof call.name === "string" && typeof call.arguments === "string")
    && haveText(tokens) && [reasoning, error, state].every(isText);
}

/** Returns whether each node's parents lead to the top. */
function isTree(nodes) {
  const rooted = new Set([null]);
  for (const { id: first } of Object.values(nodes)) {
    const path = new Set();
    for (let id = first; !rooted.has(id); id = nodes[id].parent) {
      if (path.has(id)) return false;
      path.add(id);
    }
    for (const id of path) rooted.add(id);
  }
  return true;
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Lets the user choose files. Returns their texts. */
export function chosenFiles(accept) {
  return new Promise((resolve) => {
    const input = make("input", { type: "file", accept, multiple: true });
    input.addEventListener("change", () => resolve([...input.files]));
    input.click();
  });
}
