// Draws why a token was chosen: a table of its candidates with a column for each stage of sampling, and sentences.

import { button, make } from "./dom.js";
import { rowsOf, sentencesOf } from "./stages.js";
import { percent, spelled } from "./tokens.js";

const CHOSEN = {
  draw: "Drawn at random, by the probabilities that the stages left.",
  best: "The best one: the temperature is 0.",
  grammar: "Forced: the constraint left no other token.",
  budget: "Forced: the limit of the reasoning was reached.",
};
const BASE = "Each figure is the probability of a token after the stage, as a share of all tokens that are left.";
const ENDS = { cut: "cut", forbidden: "forbidden", gone: "" };

function styled(element, values) {
  for (const [name, value] of Object.entries(values)) element.style.setProperty(`--${name}`, `${value * 100}%`);
  return element;
}

/** Returns a cell of the draw: the token's part of the line from 0 to 1, and where the random number is on it. */
function drawCell({ share, isChosen }, random) {
  if (!share) return make("td", {});
  const [start, end] = share;
  const line = make("span", { class: "draw-line", "aria-hidden": "true" }, styled(make("span", { class: "share" }), { start, width: end - start }), styled(make("span", { class: "needle" }), { start: random }));
  return make("td", { class: "draw" }, line, make("span", { class: "number" }, `${start.toFixed(3)}–${end.toFixed(3)}`, isChosen ? make("span", { class: "hidden-text" }, `, has the random number ${random.toFixed(3)}`) : null));
}

function rowElement(row, random, take) {
  const { candidate, isChosen, isForbidden, isCut, cells } = row, name = spelled(candidate.text);
  const label = `Take ${name} instead, ${isForbidden ? "forbidden" : `${percent(cells[0].p)}${isCut ? ", cut" : ""}`}`;
  const head = isChosen || !take ? make("span", { class: "candidate" }, name, isChosen ? make("span", { class: "hidden-text" }, " (chosen)") : null)
    : button(name, () => take(candidate), { class: isCut ? "take cut" : "take", disabled: isForbidden, title: `Take this token instead (${candidate.token_id})`, "aria-label": label });
  return make("tr", { class: [isChosen ? "chosen" : "", isCut ? "removed" : ""].join(" ").trim() || null },
    make("th", { scope: "row" }, head),
    ...cells.map(({ p, end }) => (end ? make("td", { class: "number end" }, ENDS[end]) : styled(make("td", { class: "number" }, percent(p)), { share: p }))),
    ...(random === null ? [] : [drawCell(row, random)]));
}

function legend(canTake) {
  const parts = [["chosen", "chosen"], ["filled", "the fill is the probability"], ["end", "cut or forbidden by this stage"]];
  return make("p", { class: "legend" }, ...parts.map(([kind, text]) => make("span", { class: `key-${kind}` }, text)), canTake ? make("span", {}, "choose a token to take it instead") : null);
}

/** Returns the table: a row for each candidate, a column for each stage. `take(candidate)`; null: tokens are not to be taken. */
function table(explanation, sentences, take) {
  const random = explanation.stages.some((stage) => stage.stage === "draw") ? explanation.random : null;
  const columns = sentences.filter(({ name }) => name !== "choice");
  const heads = columns.map(({ name, value }, index) => make("th", { scope: "col" }, make("small", {}, `${index + 1} `), name.replaceAll("_", "_\u200b"), value ? make("b", {}, ` ${value}`) : null));
  return make("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Candidates after each stage" },
    make("table", { class: "candidates", "aria-describedby": "base" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "token"), ...heads)),
      make("tbody", {}, ...rowsOf(explanation).map((row) => rowElement(row, random, take)))));
}

/** Returns the view of a token. `onTake(candidate)` branches with another token; null: this answer cannot be branched. */
export function explanationView(node, index, explanation, onTake) {
  const token = node.tokens[index];
  const why = token.by === "user" ? "Taken by you, when the answer was branched." : token.kept ? "Kept from the answer that was branched." : CHOSEN[explanation?.chosen_by ?? token.by] || "";
  const facts = make("dl", { class: "facts" }, ...[["token", token.id], ["place", index + 1]].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
  const parts = [make("div", { class: "chosen-token" }, spelled(token.text)), make("p", {}, why), facts];
  if (explanation?.guessed) parts.push(make("p", { class: "muted" }, "Guessed by speculative decoding, and confirmed by the draw."));
  if (explanation?.stages?.length) {
    let isTaking = false;
    const take = async (candidate) => {
      if (isTaking) return;
      isTaking = true;
      await onTake(candidate);
      isTaking = false;
    };
    const sentences = sentencesOf(explanation);
    parts.push(make("ol", { class: "sentences" }, ...sentences.map(({ text }) => make("li", { class: "stage" }, text))), make("p", { class: "base", id: "base" }, BASE), table(explanation, sentences, onTake && take), legend(onTake));
  }
  return make("div", { class: "explanation" }, ...parts);
}
