// The page: wires conversations, turns, settings and explanations together.

import { announce, button, byId, counted, dialog, make, tabs } from "./dom.js";
import { add, before, create, isBlank, parentOf, select, settleAll, shown } from "./conversation.js";
import { explanationOf, making, run, textOf } from "./answer.js";
import { compareView } from "./compare.js";
import { composerOf } from "./composer.js";
import { connection } from "./connection.js";
import { showContext } from "./context.js";
import { showPrograms } from "./copyas.js";
import { explanationView } from "./explain.js";
import { constraintsOf } from "./fields.js";
import { letterOf, showHelp } from "./keys.js";
import { MAX_EXPLAINED } from "./request.js";
import { showSettings } from "./settings.js";
import { exportConversations, importConversations, showConversations, titleOf } from "./sidebar.js";
import * as store from "./store.js";
import { lasting } from "./webstorage.js";
import { turnsView } from "./turns.js";

const SAVE_AFTER_MS = 300, NEAR_END_PX = 80;

const state = { conversations: [], current: null, parameters: [], models: [], canSee: false, contextLength: 0, view: lasting.getItem("tureen.view") || "text", compare: null, running: new Map(), panel: null, explained: null, unsaved: new Set(), deleted: new WeakSet() };
const explain = { get: () => lasting.getItem("tureen.explain") !== "off", set: (on) => lasting.setItem("tureen.explain", on ? "on" : "off") };
const stage = byId("stage");
const composer = composerOf({ canSee: () => state.canSee, onChange: () => { save(); showMeter(); } });
const server = connection(state, {
  onLearnt() { if (state.current && !byId("panel-settings").contains(document.activeElement)) { showPanel(); showMeter(); } },
  onModels() { for (const { node } of state.running.values()) turns.changed(node); },
  isWaiting: () => [...state.running.values()].some(({ node }) => node.state === "waiting"),
});
let saving = 0;

// --- conversations

function save(conversation = state.current) {
  if (state.deleted.has(conversation)) return;
  conversation.updated = Date.now();
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  state.unsaved.add(conversation);
  saving ||= setTimeout(() => { flush(); listConversations(); }, SAVE_AFTER_MS);
}

/** Writes what is about to be written. */
function flush() {
  clearTimeout(saving);
  saving = 0;
  for (const one of state.unsaved) {
    if (isBlank(one)) state.conversations = state.conversations.filter((other) => other !== one);
    (isBlank(one) ? store.remove(one.id) : store.save(one)).catch((error) => announce(`This browser does not keep the conversation: ${error.message}`));
  }
  state.unsaved.clear();
}

/** Writes everything before the page goes, answers that still come, too. */
function leave() {
  for (const { conversation } of state.running.values()) save(conversation);
  flush();
}

function listConversations() {
  showConversations(byId("conversations"), state.conversations, state.current, byId("search").value, { open, rename, remove: askToRemove });
}

function open(conversation) {
  flush();
  state.current = conversation;
  leaveCompare();
  if (conversation.model && state.models.some((one) => one.id === conversation.model)) byId("model").value = conversation.model;
  else conversation.model = byId("model").value;
  server.follow();
  byId("message").placeholder = conversation.mode === "chat" ? "Message" : "Text to be continued …";
  composer.show(conversation);
  showPanel();
  showToken(null);
  redraw();
  if (matchMedia("(max-width: 900px)").matches) toggle("side", false);
}

/** Shows conversations that were read from a file, and keeps them if they can be shown. */
function takeIn(found) {
  if (!found.length) return;
  const last = state.current;
  state.conversations.unshift(...found);
  try {
    open(found[0]);
  } catch (error) {
    state.conversations = state.conversations.filter((one) => !found.includes(one));
    open(last);
    throw new Error(`This file's conversation cannot be shown: ${error.message}`, { cause: error });
  }
  for (const one of found) state.unsaved.add(one);
  flush();
}

function start(mode) {
  const last = state.current;
  open(create({ mode, model: byId("model").value, ...(last ? { settings: structuredClone(last.settings) } : {}) }));
  byId("message").focus();
}

// --- what is shown

function redraw() {
  const { current } = state;
  byId("title").textContent = titleOf(current);
  byId("turns").classList.toggle("completion", current.mode === "completion");
  const nodes = shown(current);
  turns.show(current, nodes);
  byId("empty").hidden = Boolean(nodes.length) || current.mode !== "chat" || Boolean(state.compare);
  showRunning();
  showMeter();
  listConversations();
  stage.scrollTop = stage.scrollHeight;
}

function showRunning() {
  const isRunning = runningHere().length > 0, hadFocus = document.activeElement === byId("stop");
  byId("stop").hidden = !isRunning;
  byId("send").disabled = isRunning;
  if (hadFocus && !isRunning) byId(matchMedia("(pointer: fine)").matches ? "message" : "send").focus(); // a message would open a phone's keyboard
}

/** Shows how much of the context is taken. */
function showMeter() {
  const { current } = state;
  const point = showContext(current, shown(current), byId("message").value + (current.draft?.files ?? []).map((file) => file.text).join(""), state.contextLength);
  byId("drop").onclick = () => { actions.beginAt(point); byId("message").focus(); };
}

/** Returns the answers of the shown conversation that still come. */
const runningHere = () => [...state.running.values()].filter(({ conversation }) => conversation === state.current);

let following = 0;
function follow() {
  following ||= requestAnimationFrame(() => {
    following = 0;
    if (stage.scrollHeight - stage.scrollTop - stage.clientHeight < NEAR_END_PX + stage.clientHeight / 4) stage.scrollTop = stage.scrollHeight;
  });
}

function showPanel() {
  state.panel = showSettings({ conversation: state.current, parameters: state.parameters, onChange: () => { if (!isBlank(state.current)) save(); showMeter(); }, modelOf: () => byId("model").value, explain, head: byId("before-fields"), fields: byId("fields") });
}

function setView(view) {
  state.view = view;
  lasting.setItem("tureen.view", view);
  for (const name of ["text", "tokens"]) byId(`view-${name}`).setAttribute("aria-pressed", String(name === view));
  if (state.compare) state.compare.redraw();
  else if (state.current) turns.show(state.current, shown(state.current));
}

// --- answers

async function answer(conversation, node, { isPatient = false } = {}) {
  const stopping = new AbortController();
  state.running.set(node.id, { conversation, stopping, node });
  server.watch();
  const more = (index) => add(conversation, parentOf(conversation, node), { role: "assistant", made: { ...node.made, seed: node.made.seed + index } });
  if (state.current === conversation) redraw();
  const onChange = (changed) => {
    if (state.current !== conversation) return;
    if (!byId(`turn-${changed.id}`)) turns.show(conversation, shown(conversation));
    turns.changed(changed);
    server.showLink(changed.state === "lost");
    follow();
  };
  const nodes = await run(conversation, node, { signal: stopping.signal, onChange, more, isPatient });
  if (nodes.length > 1) select(conversation, node);
  state.running.delete(node.id);
  server.showLink(false);
  showRunning();
  if (state.current === conversation) {
    turns.show(conversation, shown(conversation));
    showMeter();
    if (node.state === "failed" && node.errorField) state.panel.showFault(node.errorField, node.error);
    announce(node.state === "failed" ? node.error : `The answer is complete: ${counted(node.figures.completion ?? 0, "token")}`, { shown: false });
  }
  save(conversation);
  flush();
}

/** Returns the node of the answer, which has begun. */
function requestAnswer(parent, { conversation = state.current, made = making(conversation, explain.get()) } = {}) {
  const node = add(conversation, parent, { role: "assistant", made, tokens: [], figures: {}, calls: [], state: "waiting" });
  save(conversation);
  answer(conversation, node);
  return node;
}

async function send() {
  await ready;
  if (runningHere().length || composer.isEmpty() || hasUnread()) return;
  requestAnswer(add(state.current, shown(state.current).at(-1) ?? null, { role: "user", ...composer.take() }));
}

/** Returns whether a setting has a value that cannot be read; shows it then. */
function hasUnread() {
  const [field] = byId("fields").getElementsByClassName("unread");
  if (!field) return false;
  announce(`Not sent: ${field.querySelector(".fault").textContent}`);
  selectTab(byId("tab-settings"));
  toggle("inspector", true);
  field.closest("details").open = true;
  field.querySelector("input, textarea, select").focus();
  return true;
}

const stop = () => { for (const { stopping } of runningHere()) stopping.abort(); state.compare?.stop(); };

/** Returns `act`, after which the focus is on the conversation: the button that did it is gone. */
const leaving = (act) => (node) => { act(node); byId("stage").focus({ preventScroll: true }); };

const actions = {
  view: () => state.view,
  modelName: () => byId("model").value || "Model",
  select(node) { select(state.current, node); save(); turns.show(state.current, shown(state.current)); showToken(null); },
  regenerate: leaving((node) => { if (!hasUnread()) { requestAnswer(parentOf(state.current, node)); showToken(null); } }),
  retry: leaving((node) => { if (!node.made.kept.length) node.made = making(state.current, explain.get()); answer(state.current, node); }),
  retryLater: leaving((node) => answer(state.current, node, { isPatient: true })),
  goOn: leaving((node) => goOn(state.current, node)),
  roomAfter: ({ figures }) => (state.contextLength && figures.prompt !== undefined ? state.contextLength - figures.prompt - figures.completion : Infinity),
  isLoading: ({ state: at, made }) => at === "waiting" && ["loading", "unloaded"].includes(state.models.find((one) => one.id === made.model)?.status),
  beginAt: leaving((node) => { state.current.from = node?.id ?? ""; save(); turns.show(state.current, shown(state.current)); showMeter(); }),
  code: (node) => showPrograms(state.current, node),
  edit(node, text) {
    const { id: _, parent: __, ...rest } = node;
    const changed = { ...rest, text, ...(node.role === "assistant" ? { tokens: [], figures: {}, state: "done", made: { ...node.made, kept: [] } } : {}) };
    const made = add(state.current, parentOf(state.current, node), changed);
    if (node.role !== "assistant") requestAnswer(made);
    else { save(); redraw(); }
  },
  callName: (node) => parentCalls(node).find((call) => call.id === node.callId)?.name,
  hasResult: (node, call) => resultsAfter(node).some((one) => one.callId === call.id),
  giveResult(node, call, text) {
    const last = resultsAfter(node).at(-1) ?? node;
    const result = add(state.current, last, { role: "tool", text, callId: call.id });
    save();
    const isComplete = node.calls.every((one) => actions.hasResult(node, one));
    if (isComplete) requestAnswer(result);
    else { turns.show(state.current, shown(state.current)); }
  },
  explain: (node, index) => showToken(state.current, node, index),
};

/** Returns the results that follow an answer's calls, as they are shown. */
function resultsAfter(node) {
  const nodes = shown(state.current), rest = nodes.slice(nodes.indexOf(node) + 1);
  const end = rest.findIndex((one) => one.role !== "tool");
  return end < 0 ? rest : rest.slice(0, end);
}

const parentCalls = (node) => before(state.current, node).filter((one) => one.role === "assistant").at(-1)?.calls || [];

// --- explanations and branches

async function showToken(conversation, node, index) {
  const panel = byId("panel-token");
  if (!conversation) {
    state.explained = null;
    panel.replaceChildren(make("p", { class: "muted" }, "Show answers as tokens and choose a token. This panel then shows why it was drawn, and its alternatives."));
    return;
  }
  selectTab(byId("tab-token"));
  toggle("inspector", true);
  const asked = {};
  state.explained = asked;
  panel.replaceChildren(make("p", { class: "muted", role: "status" }, "Asking the server for the same tokens again …"));
  let explanation = null, fault = null;
  try {
    explanation = await explanationOf(conversation, node, index);
  } catch (error) {
    fault = make("p", { class: "note bad", role: "alert" }, error.message);
  }
  if (state.explained !== asked) return;
  const isHere = conversation === state.current;
  panel.replaceChildren(...(fault ? [fault] : []), explanationView(node, index, explanation, isHere ? (candidate) => branch(conversation, node, index, candidate) : null));
  panel.scrollTop = 0;
}

/** Begins another answer; returns when it has begun. It has the same tokens up to `index`, and there `candidate`, if any. */
async function branch(conversation, node, index, candidate) {
  const kept = node.tokens.slice(0, index).map((token) => ({ ...token, kept: true }));
  if (candidate) kept.push({ id: candidate.token_id, text: candidate.text, logprob: null, by: "user" });
  const settings = { ...node.made.settings }, held = constraintsOf(state.parameters).filter((one) => settings[one.name] !== undefined);
  for (const one of held) delete settings[one.name];
  if (held.length) announce("The constraint applies to whole answers only. This branch continues without it.");
  try {
    const keptText = await textOf(kept.map((token) => token.id), node.made.model);
    if (state.deleted.has(conversation)) return;
    const taken = requestAnswer(parentOf(conversation, node), { conversation, made: { ...node.made, settings, kept, keptText } });
    if (candidate && conversation === state.current) showTaken(conversation, taken, index);
  } catch (error) {
    announce(error.message);
  }
}

/**
 * Goes on with an answer that was cut, as another version. Its tokens are kept; where the answer is parsed as a whole, the
 * request is sent again with more room: its seed brings the same tokens.
 */
function goOn(conversation, node) {
  const { made } = node, count = node.tokens.length - made.kept.length;
  const isWhole = constraintsOf(state.parameters).some((one) => made.settings[one.name] !== undefined) || node.reasoning || node.calls.length;
  const room = isWhole ? Math.min(2 * count, count + actions.roomAfter(node)) : Math.min(count, actions.roomAfter(node));
  const settings = { ...made.settings, n: 1, max_new_tokens: room }, explain = made.explain && room <= MAX_EXPLAINED;
  if (isWhole) return requestAnswer(parentOf(conversation, node), { conversation, made: { ...made, settings, explain } });
  return branch(conversation, { ...node, made: { ...made, settings } }, node.tokens.length, null);
}

/** Explains the token that a branch began with; uncovers the branch where the panel covers it. */
function showTaken(conversation, node, index) {
  const isOver = matchMedia("(max-width: 1180px)").matches;
  if (isOver) toggle("inspector", false);
  showToken(isOver ? null : conversation, node, index);
  byId(isOver ? "stage" : "panel-token").focus();
}

// --- comparing

function leaveCompare() {
  if (!state.compare) return;
  state.compare.stop();
  state.compare.element.remove();
  state.compare = null;
  setCompare(false);
}

function setCompare(isOn) {
  byId("empty").hidden = isOn || Boolean(shown(state.current).length) || state.current.mode !== "chat";
  byId("compare").setAttribute("aria-pressed", String(isOn));
  byId("turns").hidden = isOn;
  byId("composer").hidden = isOn;
}

function toggleCompare() {
  if (state.compare) return leaveCompare();
  const constraints = constraintsOf(state.parameters);
  state.compare = compareView({
    parameters: state.parameters.filter((one) => !constraints.includes(one) && one.name !== "n"), models: state.models, conversation: state.current, view: () => state.view,
    explain: (conversation, node, index) => showToken(conversation, node, index),
    adopt(settings, model) {
      state.current.settings = structuredClone(settings);
      if (model) { state.current.model = model; byId("model").value = model; server.follow(); }
      leaveCompare();
      showPanel();
      announce("The conversation has these settings now");
    },
  });
  stage.append(state.compare.element);
  setCompare(true);
  state.compare.element.querySelector("textarea").focus();
}

// --- panels and keys

function toggle(name, isOpen = document.body.dataset[name] !== "open") {
  if (!isOpen && byId(name).contains(document.activeElement)) byId(`toggle-${name}`).focus();
  document.body.dataset[name] = isOpen ? "open" : "closed";
  byId(`toggle-${name}`).setAttribute("aria-expanded", String(isOpen));
  if (isOpen && matchMedia("(max-width: 900px)").matches) toggle(name === "side" ? "inspector" : "side", false);
}

function rename(conversation, title) {
  if (title !== conversation.title) {
    conversation.title = title;
    save(conversation);
  }
  listConversations();
  byId("title").textContent = titleOf(state.current);
}

function askToRemove(victim) {
  const asked = dialog("Delete this conversation?", make("p", {}, titleOf(victim)), make("div", { class: "row" }, button("Delete", () => { asked.close(); remove(victim); }, { class: "primary" }), button("Keep", () => asked.close())));
}

async function remove(victim) {
  state.deleted.add(victim);
  state.unsaved.delete(victim);
  for (const { conversation, stopping } of state.running.values()) if (conversation === victim) stopping.abort();
  state.conversations = state.conversations.filter((one) => one !== victim);
  await store.remove(victim.id).catch((error) => announce(`This browser still has the conversation: ${error.message}`));
  if (victim === state.current) start("chat");
  else { listConversations(); byId("search").focus(); }
}

const selectTab = tabs(document.querySelector("#inspector [role=tablist]"), (tab) => {
  for (const name of ["settings", "token"]) byId(`panel-${name}`).hidden = tab.id !== `tab-${name}`;
});
const turns = turnsView(byId("turns"), actions);
const isTyping = (element) => ["INPUT", "TEXTAREA", "SELECT"].includes(element.tagName);

function onKey(event) {
  const act = event.altKey ? { n: () => start("chat"), k: () => { toggle("side", true); byId("search").focus(); }, v: () => setView(state.view === "text" ? "tokens" : "text"), s: () => { toggle("inspector"); selectTab(byId("tab-settings")); }, c: toggleCompare }[letterOf(event)]
    : event.key === "Escape" ? () => { if (runningHere().length) stop(); else if (matchMedia("(max-width: 900px)").matches) { toggle("side", false); toggle("inspector", false); } }
    : isTyping(event.target) ? null : { "/": () => byId("message").focus(), "?": showHelp }[event.key];
  if (!act || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey) return;
  if (event.key !== "Escape") event.preventDefault();
  ready.then(act);
}

function listen() {
  const clicks = { "new-chat": () => start("chat"), "new-completion": () => start("completion"), "view-text": () => setView("text"), "view-tokens": () => setView("tokens"), compare: toggleCompare, stop, "open-key": () => server.askForKey(), help: showHelp, delete: () => askToRemove(state.current),
    export: () => exportConversations([state.current]), "export-all": () => exportConversations(state.conversations), "toggle-side": () => toggle("side"), "toggle-inspector": () => toggle("inspector"),
    import: () => importConversations(takeIn), attach: () => composer.choose() };
  for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", () => ready.then(act));
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  for (const one of document.querySelectorAll(".suggestion")) one.addEventListener("click", () => ready.then(() => requestAnswer(add(state.current, null, { role: "user", text: one.textContent }))));
  byId("message").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
  byId("message").addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); composer.attach([...event.clipboardData.files]); } });
  byId("main").addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
  byId("main").addEventListener("drop", (event) => { if (event.dataTransfer.files.length) { event.preventDefault(); composer.attach([...event.dataTransfer.files]); } });
  byId("search").addEventListener("input", listConversations);
  byId("model").addEventListener("change", () => { state.current.model = byId("model").value; if (!isBlank(state.current)) save(); server.follow(); });
  addEventListener("keydown", onKey);
  addEventListener("key-wanted", (event) => server.askForKey(event.detail));
  addEventListener("pagehide", leave);
}

async function begin() {
  toggle("side", innerWidth > 900);
  toggle("inspector", innerWidth > 1180);
  listen();
  state.conversations = await store.all().catch((error) => { announce(`What this browser has kept cannot be read: ${error.message}`); return []; });
  state.conversations.forEach(settleAll);
  await server.connect();
  setView(state.view);
  const typed = byId("message").value; // while the page was loading
  try {
    if (state.conversations.length) open(state.conversations[0]);
    else start("chat");
  } catch (error) {
    announce(`The last conversation cannot be shown: ${error.message}`);
    state.current = null;
    start("chat");
  }
  if (typed) {
    byId("message").value = [byId("message").value, typed].filter(Boolean).join("\n");
    byId("message").dispatchEvent(new Event("input"));
  }
  document.body.dataset.ready = "true";
}

/** What is asked for before there is a conversation is done when there is one. */
const ready = begin();
