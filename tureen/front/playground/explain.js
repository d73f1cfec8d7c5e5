// Draws why a token was chosen: its candidates after each stage of sampling, as bars, and the draw.

import { button, counted, make } from "./dom.js";
import { percent, spelled } from "./tokens.js";

const CHOSEN = {
  draw: "Drawn: the random number fell into its share.",
  best: "The best one: the temperature is 0.",
  grammar: "Forced: the constraint left no other token.",
  budget: "Forced: the limit of the reasoning was reached.",
};
const STAGE_NAMES = { model: "The model", grammar: "Constraint", draw: "Draw" };
const LEAST_SHARE = 0.0005; // narrower shares are not drawn

const stageName = (stage) => STAGE_NAMES[stage.stage] || stage.stage;
const parameterOf = (stage) => (stage.value === undefined || stage.value === null ? "" : typeof stage.value === "object" ? "" : ` ${stage.value}`);

function bar(p) {
  const element = make("span", { class: "bar", "aria-hidden": "true" });
  element.style.setProperty("--share", `${(p * 100).toFixed(2)}%`);
  return element;
}

function change(p, previous, isRemoved) {
  if (isRemoved) return previous === 0 ? "" : "removed";
  if (previous === null || Math.abs(p - previous) < 0.0005) return "";
  return p > previous ? "▲" : "▼";
}

function stageElement(explanation, stage, previous) {
  const rows = explanation.candidates.map((candidate, index) => {
    const p = stage.probabilities[index];
    const isRemoved = p === 0 && (stage.kept !== undefined || stage.logits?.[index] === null || previous?.probabilities[index] === 0);
    const isChosen = candidate.token_id === explanation.token_id;
    return make("tr", { class: [isChosen ? "chosen" : "", isRemoved ? "removed" : ""].join(" ").trim() || null },
      make("th", { scope: "row" }, spelled(candidate.text), isChosen ? make("span", { class: "hidden-text" }, " (chosen)") : null),
      make("td", { class: "bars" }, bar(p)),
      make("td", { class: "number" }, percent(p)),
      make("td", { class: "change" }, change(p, previous ? previous.probabilities[index] : null, isRemoved)));
  });
  const kept = stage.kept === undefined ? null : make("span", { class: "muted" }, `keeps ${counted(stage.kept, "token")}`);
  return make("section", { class: "stage" },
    make("h3", {}, make("span", {}, stageName(stage), make("code", {}, parameterOf(stage))), kept),
    make("table", { "aria-label": `After the stage ${stageName(stage)}` }, make("tbody", {}, ...rows)));
}

/** Draws the shares of [0, 1) that candidates have, and the random number. */
function drawElement(explanation, stage) {
  const shares = explanation.candidates.map((candidate, index) => ({ candidate, start: stage.starts[index], end: stage.ends[index] }))
    .filter(({ start, end }) => start !== null && end - start > LEAST_SHARE);
  const line = make("div", { class: "shares", role: "img", "aria-label": `The random number ${explanation.random.toFixed(4)} lies in the share of ${spelled(explanation.text)}` });
  for (const { candidate, start, end } of shares) {
    const share = make("span", { class: candidate.token_id === explanation.token_id ? "share chosen" : "share" }, end - start > 0.12 ? spelled(candidate.text) : "");
    share.style.setProperty("--start", `${start * 100}%`);
    share.style.setProperty("--width", `${(end - start) * 100}%`);
    line.append(share);
  }
  const needle = make("span", { class: "needle" });
  needle.style.setProperty("--start", `${explanation.random * 100}%`);
  line.append(needle);
  return make("section", { class: "stage" },
    make("h3", {}, make("span", {}, "Draw"), make("span", { class: "muted" }, `random number ${explanation.random.toFixed(6)}`)), line);
}

/** Returns the tokens that may be taken in place of the one that was, the model's likeliest first. */
function alternatives(explanation) {
  const stages = explanation.stages || [];
  if (!stages.length) return [];
  const model = stages[0].probabilities, last = stages[stages.length - 1].probabilities;
  return explanation.candidates
    .map((candidate, index) => ({ ...candidate, model: model[index], last: last[index], isForbidden: stages.some((stage) => stage.logits && stage.logits[index] === null) }))
    .filter((candidate) => candidate.token_id !== explanation.token_id)
    .sort((a, b) => b.model - a.model || b.last - a.last);
}

/** Returns [name, value] of a drawn token's probability by the model alone, and in the draw: a forced one had no choice. */
function probabilities(explanation) {
  const place = explanation?.candidates?.findIndex((one) => one.token_id === explanation.token_id) ?? -1, stages = explanation?.stages || [];
  if (place < 0 || !stages.length) return [];
  return [["by the model", stages[0]], ["in the draw", stages.at(-1)]].map(([name, stage]) => [name, percent(stage.probabilities[place])]);
}

/** Returns the view of a token. `onTake(candidate)` branches with another token; null: this answer cannot be branched. */
export function explanationView(node, index, explanation, onTake) {
  const token = node.tokens[index];
  const why = token.by === "user" ? "Taken by you, when the answer was branched." : token.kept ? "Kept from the answer that was branched." : CHOSEN[explanation?.chosen_by ?? token.by] || "";
  const facts = make("dl", { class: "facts" },
    ...[["token", token.id], ["place", index + 1], ...probabilities(explanation)].flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
  const parts = [make("div", { class: "chosen-token" }, spelled(token.text)), make("p", {}, why), facts];
  if (explanation?.guessed) parts.push(make("p", { class: "muted" }, "Speculation had guessed it; it was drawn all the same."));
  const taken = explanation ? alternatives(explanation) : [];
  if (onTake && taken.length) {
    let isTaking = false;
    const take = async (candidate) => {
      if (isTaking) return;
      isTaking = true;
      await onTake(candidate);
      isTaking = false;
    };
    const list = make("div", { class: "alternatives", role: "group", "aria-label": "Take another token" });
    for (const candidate of taken) {
      const label = candidate.isForbidden ? "forbidden" : `${percent(candidate.model)}${candidate.last > 0 ? "" : ", cut"}`;
      list.append(button(spelled(candidate.text), () => take(candidate), { class: candidate.last > 0 ? "take" : "take cut", disabled: candidate.isForbidden, title: `token ${candidate.token_id}`, "aria-label": `Take ${spelled(candidate.text)} instead, ${label}` }));
      list.lastElementChild.append(make("small", {}, label));
    }
    parts.push(make("h3", {}, make("span", {}, "Take another"), make("span", { class: "muted" }, "probability by the model")), list);
  }
  const stages = explanation?.stages || [];
  stages.forEach((stage, place) => parts.push(stage.stage === "draw" ? drawElement(explanation, stage) : stageElement(explanation, stage, stages[place - 1])));
  return make("div", { class: "explanation" }, ...parts);
}
