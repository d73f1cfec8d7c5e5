// The box of the constraint: a schema, a pattern or a grammar. The server judges it while it is written.

import { ask } from "./api.js";
import { make } from "./dom.js";
import { parse } from "./fields.js";
import { labelOf } from "./labels.js";

const WAIT_MS = 350;
const EXAMPLES = {
  json_schema: '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string", "maxLength": 30},\n    "age": {"type": "integer", "minimum": 0}\n  },\n  "required": ["name", "age"]\n}',
  regex: "[0-9]{4}-[0-9]{2}-[0-9]{2}",
  ebnf: 'root ::= "yes" | "no"',
  choice: "positive\nnegative",
};

/** Returns {line, column} of the place that a message of JSON.parse names; null where it names none. */
function placeIn(text, message) {
  const named = message.match(/line (\d+) column (\d+)/);
  if (named) return { line: Number(named[1]), column: Number(named[2]) };
  const position = message.match(/position (\d+)/);
  if (!position && !/end of JSON|Unexpected end/.test(message)) return null;
  const before = text.slice(0, position ? Number(position[1]) : text.length).split("\n");
  return { line: before.length, column: before[before.length - 1].length + 1 };
}

/** Returns the fault of a text that must be JSON, with its place; null for none. */
export function jsonFault(text) {
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    const place = placeIn(text, error.message);
    return { place, message: `Not JSON${place ? `, line ${place.line}, column ${place.column}` : ""}: ${error.message}` };
  }
}

/**
 * Returns {element, showFault(message)}. `settings` is changed in place: of `constraints` it has at most one.
 * `modelOf()` is the model to ask.
 */
export function constraintBox(constraints, settings, onChange, modelOf) {
  const current = constraints.find((one) => settings[one.name] !== undefined);
  const kind = make("select", { id: "constraint-kind", "aria-label": "Kind of constraint" }, make("option", { value: "" }, "Any text"), ...constraints.map((one) => make("option", { value: one.name }, labelOf(one.name))));
  kind.value = current?.name || "";
  const text = make("textarea", { id: "constraint-text", rows: 7, spellcheck: "false", "aria-label": "Constraint", "aria-describedby": "constraint-verdict constraint-about" });
  const gutter = make("div", { class: "gutter", "aria-hidden": "true" });
  const verdict = make("p", { id: "constraint-verdict", class: "verdict", role: "status" });
  const about = make("p", { class: "about", id: "constraint-about" });
  const editor = make("div", { class: "editor" }, gutter, text);
  if (current) text.value = typeof settings[current.name] === "string" ? settings[current.name] : Array.isArray(settings[current.name]) ? settings[current.name].join("\n") : JSON.stringify(settings[current.name], null, 2);
  let timer = 0, asked = 0;

  const chosen = () => constraints.find((one) => one.name === kind.value);
  const isJson = (one) => one.kind.type === "object";

  function say(message, state, place = null) {
    verdict.textContent = message;
    verdict.className = `verdict ${state}`;
    text.setAttribute("aria-invalid", String(state === "bad"));
    const count = text.value.split("\n").length;
    gutter.replaceChildren(...Array.from({ length: count }, (_, index) => make("span", { class: place?.line === index + 1 ? "bad" : null }, String(index + 1))));
  }

  async function judge(one, value) {
    const mine = ++asked;
    say("checking …", "");
    try {
      const model = modelOf();
      const answered = await ask("v1/completions", { ...(model ? { model } : {}), prompt: " ", max_tokens: 0, [one.name]: value, ...(settings.strict_schema ? { strict_schema: true } : {}) });
      if (mine !== asked) return;
      const { unenforced } = answered.choices[0];
      if (unenforced?.length) say(`Valid, but not all of it is enforced. Answers may break: ${unenforced.join(", ")}.`, "warn");
      else say("Valid. The answer will match it.", "good");
    } catch (error) {
      if (mine !== asked) return;
      const line = error.message.match(/line (\d+)/);
      say(error.message, "bad", line && !isJson(one) ? { line: Number(line[1]) } : null);
    }
  }

  function read() {
    clearTimeout(timer);
    for (const one of constraints) delete settings[one.name];
    const one = chosen();
    editor.hidden = !one;
    about.replaceChildren(...(one ? [make("code", {}, one.name), ` ${one.meaning}`] : []));
    if (!one || !text.value.trim()) {
      asked += 1;
      return say("", "");
    }
    const fault = isJson(one) ? jsonFault(text.value) : null;
    if (fault) {
      asked += 1;
      settings[one.name] = text.value; // the server refuses it, too, and says why
      return say(fault.message, "bad", fault.place);
    }
    settings[one.name] = isJson(one) ? JSON.parse(text.value) : parse(one.kind, text.value).value;
    say("checking …", "");
    timer = setTimeout(() => judge(one, settings[one.name]), WAIT_MS);
  }

  kind.addEventListener("change", () => {
    if (!text.value.trim() || Object.values(EXAMPLES).includes(text.value)) text.value = EXAMPLES[kind.value] || "";
    read();
    onChange();
  });
  text.addEventListener("input", () => { read(); onChange(); });
  text.addEventListener("scroll", () => { gutter.scrollTop = text.scrollTop; });
  const element = make("div", { class: "constraint" }, kind, editor, verdict, about);
  read();
  return { element, showFault: (message) => say(message, "bad"), names: constraints.map((one) => one.name) };
}
