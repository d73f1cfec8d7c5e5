// What the stages of sampling did to the candidates for a token, as rows of a table and as sentences.

import { counted } from "./dom.js";
import { percent, spelled } from "./tokens.js";

const MOST_NAMED = 3;

const quoted = (candidate) => `“${spelled(candidate.text)}”`;
const bestOf = (values) => values.indexOf(Math.max(...values));

/**
 * Returns a row for each candidate: {candidate, isChosen, isForbidden, isCut, cells, share}. A cell is {p, end}: the
 * probability after a stage; end: "" | "cut" | "forbidden" at the stage that removed the token, "gone" after it. `share`
 * is what the draw gives it of [0, 1), [start, end]; null without one. Rows are in the order of the draw; the model's
 * best come first among those that are not drawn from.
 */
export function rowsOf({ candidates, stages, token_id: chosen }) {
  const draw = stages.find((stage) => stage.stage === "draw"), shown = stages.filter((stage) => stage !== draw);
  const rows = candidates.map((candidate, index) => {
    let isGone = false;
    const cells = shown.map((stage) => {
      const p = stage.probabilities[index], isForbidden = stage.logits?.[index] === null;
      const end = isGone ? "gone" : isForbidden ? "forbidden" : p === 0 && stage.kept !== undefined ? "cut" : "";
      isGone ||= end !== "";
      return { p, end };
    });
    const start = draw?.starts[index] ?? null;
    return { candidate, cells, isChosen: candidate.token_id === chosen, isForbidden: cells.some(({ end }) => end === "forbidden"), isCut: isGone, share: start === null ? null : [start, draw.ends[index]] };
  });
  return rows.sort((a, b) => (a.share?.[0] ?? 2) - (b.share?.[0] ?? 2) || b.cells[0].p - a.cells[0].p);
}

/** Returns [{name, value, text}]: for each stage its name, its parameter ("" without) and a sentence that says what it did. */
export function sentencesOf(explanation) {
  const { stages, chosen_by: by } = explanation;
  const found = stages.map((stage, place) => ({ name: stage.stage === "grammar" ? "constraint" : stage.stage.replace("custom_", ""), value: ["string", "number"].includes(typeof stage.value) ? String(stage.value) : "", text: sentence(explanation, stage, stages.slice(0, place)) }));
  return by === "best" ? [...found, { name: "choice", value: "", text: "The temperature is 0: the best token is taken, and nothing is drawn." }] : found;
}

function sentence(explanation, stage, earlier) {
  const { candidates, token_id: chosen } = explanation, place = candidates.findIndex((one) => one.token_id === chosen);
  if (stage.stage === "model") return ofModel(candidates, stage.probabilities, place);
  if (stage.stage === "draw") return `The random number ${explanation.random.toFixed(4)} is in the share of ${quoted(candidates[place])}, which goes from ${stage.starts[place].toFixed(4)} to ${stage.ends[place].toFixed(4)}.`;
  const last = earlier.at(-1);
  if (stage.stage === "temperature") {
    const best = bestOf(last.probabilities), was = last.probabilities[best], is = stage.probabilities[best];
    return `Temperature ${stage.value} made the best token ${is >= was ? "more" : "less"} likely: ${percent(was)} became ${percent(is)}.`;
  }
  const name = stage.stage === "grammar" ? "The constraint" : [stage.stage, ["string", "number"].includes(typeof stage.value) ? stage.value : ""].filter((one) => one !== "").join(" ");
  if (stage.kept !== undefined) return `${name} kept ${counted(stage.kept, "token")} and removed all others.`;
  return `${name} ${changes(candidates, stage.logits, earlier.findLast((one) => one.logits)?.logits ?? stage.logits)}.`;
}

function ofModel(candidates, probabilities, place) {
  const best = bestOf(probabilities), p = percent(probabilities[place]);
  if (best === place) return `The model gives ${quoted(candidates[place])} ${p}, the highest probability.`;
  return `The model gives ${quoted(candidates[place])} ${p}. ${quoted(candidates[best])} has the most, ${percent(probabilities[best])}.`;
}

/** Returns what a stage did to the logits of candidates: which it forbade, raised and lowered. null is −∞. */
function changes(candidates, logits = [], before = []) {
  const of = (test) => candidates.filter((_, index) => test(logits[index] ?? -Infinity, before[index] ?? -Infinity));
  const parts = [["forbade", of((is, was) => is === -Infinity && was !== -Infinity)], ["raised", of((is, was) => is > was)], ["lowered", of((is, was) => is < was && is !== -Infinity)]];
  const said = parts.filter(([, all]) => all.length).map(([verb, all]) => `${verb} ${all.slice(0, MOST_NAMED).map(quoted).join(", ")}${all.length > MOST_NAMED ? ` and ${all.length - MOST_NAMED} more` : ""}`);
  return said.length ? said.join(" and ") : "changed none of these tokens";
}
