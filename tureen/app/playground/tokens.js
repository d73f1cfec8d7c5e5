// Shows an answer as tokens: each shaded by its probability, forced ones and those that came from the cache marked.

import { make, visible } from "./dom.js";

const STEPS = [0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95]; // lower ends of the shades; below the first is the darkest
const GROUP = 64; // tokens of an element that the browser may skip while it is off the screen

export function probability(token) {
  return token.logprob === null || token.logprob === undefined ? null : Math.min(1, Math.exp(token.logprob));
}

export const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.1 ? `${(p * 100).toFixed(1)} %` : p >= 0.0001 ? `${(p * 100).toPrecision(2)} %` : p > 0 ? "< 0.01 %" : "0 %");

export function shade(p) {
  return p === null ? "" : `s${STEPS.filter((least) => p >= least).length}`;
}

/** Returns a token's text with what cannot be seen made visible. */
export function spelled(text) {
  return visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "·") || "∅";
}

const REASONS = { grammar: "forced by the constraint", budget: "forced by the limit of the reasoning", user: "taken by you", kept: "kept from the branch's origin" };

function described(token, isCached) {
  const p = token.by === "grammar" || token.by === "budget" ? null : probability(token); // a forced one was not drawn
  return [spelled(token.text), p === null ? "" : percent(p), REASONS[token.by] || "", token.kept ? REASONS.kept : "", isCached ? "from the prefix cache" : ""].filter(Boolean).join(", ");
}

/** Returns the number of an answer's kept tokens whose keys and values came from the prefix cache. */
export function cachedTokens(node) {
  const { prompt, cached } = node.figures;
  if (prompt === undefined) return 0;
  return Math.max(0, Math.min(node.made.kept.length, cached - (prompt - node.made.kept.length)));
}

/** A list of tokens that grows with its node. `onPick(index)` is called for the token that is clicked or entered. */
export function tokenList(node, onPick) {
  const list = make("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", tabindex: 0 });
  let current = 0, numCached = 0;

  function elementOf(token, index) {
    const isCached = index < numCached, wraps = token.text.includes("\n");
    const classes = ["token", shade(probability(token)), token.by === "grammar" || token.by === "budget" ? "forced" : "", token.by === "user" ? "taken" : "", token.kept ? "kept" : "", isCached ? "cached" : ""];
    const text = wraps ? visible(token.text).replaceAll("\n", "↵\n") : visible(token.text);
    return make("span", { id: `${node.id}-${index}`, class: classes.filter(Boolean).join(" "), role: "option", "aria-selected": "false", "aria-label": described(token, isCached), title: described(token, isCached), data: { index } }, text);
  }

  function grow() {
    const known = list.querySelectorAll(".token").length;
    if (known > node.tokens.length || cachedTokens(node) !== numCached) {
      numCached = cachedTokens(node);
      list.replaceChildren();
      return grow();
    }
    for (let index = known; index < node.tokens.length; index++) {
      if (index % GROUP === 0) list.append(make("span", { class: "group", role: "presentation" }));
      list.lastElementChild.append(elementOf(node.tokens[index], index));
    }
  }

  function mark(index) {
    list.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    current = Math.max(0, Math.min(index, node.tokens.length - 1));
    const element = list.querySelector(`[data-index="${current}"]`);
    element?.setAttribute("aria-selected", "true");
    if (element) list.setAttribute("aria-activedescendant", element.id);
    return element;
  }

  list.addEventListener("click", (event) => {
    const index = event.target.closest(".token")?.dataset.index;
    if (index === undefined) return;
    mark(Number(index));
    onPick(Number(index));
  });
  list.addEventListener("keydown", (event) => {
    const target = { ArrowRight: current + 1, ArrowLeft: current - 1, ArrowDown: current + 10, ArrowUp: current - 10, Home: 0, End: node.tokens.length - 1 }[event.key];
    if (target !== undefined) mark(target)?.scrollIntoView({ block: "nearest" });
    else if (event.key === "Enter" || event.key === " ") onPick(current);
    else return;
    event.preventDefault();
  });
  list.addEventListener("focus", () => { if (node.tokens.length && !list.querySelector("[aria-selected=true]")) mark(current); });
  grow();
  return { element: list, grow, mark };
}
