// Shows a conversation's turns. A turn keeps its element while its node is shown; a node that grows changes only what
// has changed, once a frame.

import { button, copy, counted, make, visible } from "./dom.js";
import { sent, siblings } from "./conversation.js";
import { showMarkdown } from "./markdown.js";
import { promptIdsOf, textsOf } from "./answer.js";
import { tokenList } from "./tokens.js";

const LONGEST_PROMPT = 600; // tokens of a prompt that are shown
const NAMES = { user: "You", tool: "Tool result" };
const ENDS = { content_filter: "Ended by the server." };

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);

export function figuresText({ ttft, rate, completion, prompt, cached }) {
  const parts = [];
  if (ttft !== undefined) parts.push(["first token", seconds(ttft)]);
  if (rate !== undefined) parts.push(["speed", `${rate.toFixed(1)} tok/s`]);
  if (completion !== undefined) parts.push(["answer", `${completion} tok`]);
  if (prompt !== undefined) parts.push(["prompt", `${prompt} tok`], ["from cache", `${cached} tok`]);
  return parts;
}

export function showFigures(element, figures) {
  const parts = figuresText(figures);
  element.replaceChildren(...parts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  element.hidden = !parts.length;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Shows what of the prompt came from the cache, and on demand its tokens. */
function promptBar(conversation, node) {
  const { prompt, cached } = node.figures;
  if (prompt === undefined) return null;
  const share = make("span", { class: "share" });
  share.style.setProperty("--share", `${(cached / Math.max(1, prompt)) * 100}%`);
  const tokens = make("p", { class: "tokens" });
  const details = make("details", { class: "prompt" }, make("summary", {}, make("span", { class: "cachebar", "aria-hidden": "true" }, share), `prompt: ${cached} of ${counted(prompt, "token")} from the prefix cache`), tokens);
  details.addEventListener("toggle", async () => {
    if (!details.open || tokens.childElementCount) return;
    const ids = await promptIdsOf(conversation, node).catch(() => []);
    const texts = await textsOf(ids.slice(0, LONGEST_PROMPT), node.made.model).catch(() => []);
    tokens.replaceChildren(...texts.map((text, index) => make("span", { class: index < cached ? "token cached" : "token", title: index < cached ? "from the prefix cache" : "computed" }, visible(text).replaceAll("\n", "↵\n"))));
    if (!texts.length) tokens.textContent = "Its tokens are not known.";
    if (ids.length > LONGEST_PROMPT) tokens.append(` … and ${ids.length - LONGEST_PROMPT} more`);
  });
  return details;
}

/** A turn of the page. `actions` are those of app.js. */
class Turn {
  constructor(conversation, node, actions) {
    Object.assign(this, { conversation, node, actions, list: null, frame: 0 });
    this.who = make("h2", { class: "who" }, node.role === "assistant" ? node.made.model || actions.modelName() : NAMES[node.role]);
    this.switcher = make("span", { class: "switcher" });
    this.body = make("div", { class: "body" });
    this.extra = make("div", { class: "extra" });
    this.figures = make("dl", { class: "figures" });
    this.buttons = make("div", { class: "buttons" });
    this.element = make("article", { class: `turn ${node.role}`, "aria-label": node.role === "assistant" ? "Answer" : NAMES[node.role], id: `turn-${node.id}` },
      make("div", { class: "turn-head" }, this.who, this.switcher, this.buttons), this.body, this.extra, this.figures);
  }

  /** Shows the node as it is now. */
  show() {
    const { node } = this;
    if (node.role === "assistant") this.showAnswer();
    else this.showSaid();
    this.showSwitcher();
    this.showBeginning();
    this.element.dataset.state = node.state || "done";
  }

  /** Shows it at the next frame: many tokens may come in one. */
  later() {
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.show(); });
  }

  showSaid() {
    const { node, actions } = this;
    if (this.shownText === node.text) return;
    this.shownText = node.text;
    const pictures = (node.pictures || []).map((url, index) => make("img", { src: url, alt: `Picture ${index + 1}` }));
    const files = (node.files || []).map((file) => make("details", { class: "attached" }, make("summary", {}, visible(file.name)), make("pre", { tabindex: 0 }, visible(file.text))));
    const text = make("div", { class: "said" }, visible(node.text));
    this.body.replaceChildren(...(pictures.length ? [make("div", { class: "pictures" }, ...pictures)] : []), ...files, text);
    this.buttons.replaceChildren(button("Edit", () => this.edit(), { "aria-label": "Edit this turn" }), button("Copy", () => copy(node.text), { "aria-label": "Copy this turn" }));
    this.element.ondblclick = null;
    if (node.role === "tool") this.who.textContent = `Result of ${actions.callName(node) || "a tool"}`;
  }

  edit() {
    const { node, actions } = this;
    const area = make("textarea", { rows: Math.min(12, node.text.split("\n").length + 1), "aria-label": "Edited text", value: node.text });
    const stop = () => { this.shownText = null; this.show(); };
    const save = () => { const { value } = area; stop(); if (value !== node.text) actions.edit(node, value); };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); stop(); this.buttons.querySelector("[aria-label^=Edit]")?.focus(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); save(); }
    });
    const label = node.role === "assistant" ? "Keep as a version" : "Send as a new version";
    this.body.replaceChildren(area, make("div", { class: "row" }, button(label, save, { class: "primary" }), button("Cancel", stop)));
    this.list = null;
    area.focus();
  }

  showAnswer() {
    const { node, actions } = this, isTokens = actions.view() === "tokens";
    this.showAnswerBody(isTokens);
    this.showExtra();
    showFigures(this.figures, node.figures);
    const isBusy = ["waiting", "running", "lost"].includes(node.state);
    this.body.setAttribute("aria-busy", String(isBusy));
    if (this.shownBusy === isBusy) return;
    this.shownBusy = isBusy;
    const names = [["Regenerate", "Regenerate this answer", () => actions.regenerate(node)], ["Edit", "Edit this turn", () => this.edit()], ["Copy", "Copy this turn", () => copy(node.text)], ["Code", "This request as code", () => actions.code(node)]];
    this.buttons.replaceChildren(...(isBusy ? [] : names.map(([text, label, act]) => button(text, act, { "aria-label": label }))));
  }

  showAnswerBody(isTokens) {
    const { node, actions } = this;
    if (isTokens && node.tokens.length) {
      if (!this.list) {
        this.list = tokenList(node, (index) => actions.explain(node, index, this.list));
        this.body.replaceChildren(this.list.element);
      }
      this.list.grow();
      return;
    }
    this.list = null;
    if (!this.prose?.isConnected) {
      this.prose = make("div", { class: "prose" });
      this.body.replaceChildren(this.prose);
    }
    showMarkdown(this.prose, node.text);
  }

  showExtra() {
    const { node, actions } = this, parts = [];
    if (node.reasoning) {
      this.thought ??= make("details", { class: "reasoning" }, make("summary", {}, "Reasoning"), make("div", { class: "said" }));
      this.thought.lastElementChild.textContent = visible(node.reasoning);
      parts.push(this.thought);
    }
    for (const call of node.calls || []) parts.push(this.callElement(call));
    const bar = actions.view() === "tokens" && node.state !== "running" ? promptBar(this.conversation, node) : null;
    if (bar) parts.push(bar);
    const note = this.note();
    if (note) parts.push(note);
    const answered = (node.calls || []).map((call) => actions.hasResult(node, call));
    const key = JSON.stringify([actions.isLoading(node), node.reasoning, node.calls, answered, node.error, node.state, node.finish, node.figures.prompt, actions.view()]);
    if (this.shownExtra === key) return;
    this.shownExtra = key;
    this.extra.replaceChildren(...parts);
  }

  note() {
    const { node, actions } = this, again = () => button("Try again", () => actions.retry(node));
    if (node.state === "waiting") return make("p", { class: "note" }, actions.isLoading(node) ? `${node.made.model} is being loaded …` : "Waiting for the first token …");
    if (node.state === "lost") return make("p", { class: "note bad", role: "status" }, node.tokens.length ? "Connection lost. Reconnecting …" : "The server does not answer. The page tries again until it does …");
    if (node.state === "failed") return make("p", { class: "note bad", role: "alert" }, node.error, " ", again(), ...(node.isDown ? [" ", button("Retry when the server is back", () => actions.retryLater(node))] : []));
    if (node.state === "stopped") return make("p", { class: "note" }, "Stopped.");
    if (node.finish === "length") return this.cutNote();
    return ENDS[node.finish] ? make("p", { class: "note" }, ENDS[node.finish]) : null;
  }

  cutNote() {
    const { node, actions } = this;
    if (actions.roomAfter(node) < 1) return make("p", { class: "note" }, "Cut: the context is full.");
    return make("p", { class: "note" }, "Cut: max_new_tokens was reached. ", button("Continue", () => actions.goOn(node), { "aria-label": "Continue this answer" }));
  }

  callElement(call) {
    const { node, actions } = this;
    const head = make("p", {}, "Calls ", make("code", {}, call.name));
    const element = make("section", { class: "call", "aria-label": `Call of ${call.name}` }, head, make("pre", { tabindex: 0 }, visible(pretty(call.arguments))));
    if (node.state === "done" && !actions.hasResult(node, call)) {
      const area = make("textarea", { rows: 2, placeholder: "What the tool answers", "aria-label": `Result of ${call.name}` });
      element.append(area, button("Give the result", () => actions.giveResult(node, call, area.value)));
    }
    return element;
  }

  /** Says above the first turn that is sent that earlier ones are not. */
  showBeginning() {
    const isFirst = this.conversation.from === this.node.id;
    if (isFirst === Boolean(this.beginning)) return;
    this.beginning?.remove();
    this.beginning = isFirst ? make("p", { class: "note beginning" }, "The model does not get the turns above. ", button("Send them again", () => this.actions.beginAt(null))) : null;
    if (isFirst) this.element.prepend(this.beginning);
  }

  showSwitcher() {
    const { conversation, node, actions } = this, all = siblings(conversation, node), place = all.indexOf(node);
    const key = `${place}/${all.length}`;
    if (this.shownPlace === key) return;
    this.shownPlace = key;
    if (all.length < 2) return this.switcher.replaceChildren();
    const to = (offset) => () => actions.select(all[(place + offset + all.length) % all.length]);
    this.switcher.replaceChildren(button("‹", to(-1), { class: "icon", "aria-label": "Previous version" }), `${place + 1} / ${all.length}`, button("›", to(1), { class: "icon", "aria-label": "Next version" }));
  }
}

/** Returns {show(conversation, nodes), changed(node)} for the element that holds the turns. */
export function turnsView(container, actions) {
  const turns = new Map();
  let owner = null;
  return {
    show(conversation, nodes) {
      if (owner !== conversation) { turns.clear(); container.replaceChildren(); owner = conversation; }
      const wanted = nodes.map((node) => turns.get(node.id) || turns.set(node.id, new Turn(conversation, node, actions)).get(node.id));
      const elements = wanted.map((turn) => turn.element);
      for (const element of [...container.children]) if (!elements.includes(element)) element.remove();
      elements.forEach((element, index) => { if (container.children[index] !== element) container.insertBefore(element, container.children[index] || null); });
      const first = sent(nodes, conversation.from)[0];
      wanted.forEach((turn, index) => { turn.element.classList.toggle("unsent", index < nodes.indexOf(first)); turn.show(); });
    },
    changed(node) { const turn = turns.get(node.id); if (turn?.element.isConnected) turn.later(); },
    tokensOf: (node) => turns.get(node.id)?.list,
  };
}
