// The form of the sampling parameters. Names, groups, bounds, defaults and meanings are those of /openapi.json.

import { button, make } from "./dom.js";
import { labelOf, OFTEN_USED } from "./labels.js";

const LARGEST = 2 ** 53; // bounds beyond are those of the number's format
const FIRST_GROUP = "Often used"; // it is open
const SLIDER_STEPS = 100;
const SLIDER_ENDS = { temperature: 2 }; // of parameters without a bound
const UNSET = { max_new_tokens: "what the context leaves", sampling_seed: "random", stream_interval: "the server's" }; // what acts without a value

/** Returns the parameters, in the order of the document: [{name, group, kind, kinds, defaults, meaning}]. `defaults` has a value for each mode of a conversation. */
export function parametersOf(openapi) {
  const { SamplingParams: { properties: declared }, ...bodies } = openapi.components.schemas;
  const defaultIn = (body, name, schema) => (bodies[body]?.properties[name] ?? schema).default;
  return Object.entries(declared).filter(([, schema]) => schema["x-group"]).map(([name, schema]) => {
    const kinds = (schema.anyOf || [schema]).filter((kind) => kind.type !== "null");
    const kind = kinds.find((one) => one.type === "array") || kinds.find((one) => one.type === "object") || kinds[0];
    return { name, group: schema["x-group"], kind, kinds, defaults: { chat: defaultIn("ChatBody", name, schema), completion: defaultIn("CompletionBody", name, schema) }, meaning: schema.description || "" };
  });
}

/** Returns the parameters that say what the output must be. At most one of them may be set. */
export const constraintsOf = (parameters) => parameters.filter((one) => one.group === "Constraint" && one.defaults.chat === null);

const least = (kind) => kind.minimum ?? kind.exclusiveMinimum;
const endOf = ({ name, kind }) => kind.maximum ?? SLIDER_ENDS[name];
const hasRange = (parameter) => parameter.kind.type === "number" && least(parameter.kind) !== undefined && endOf(parameter) !== undefined;

export function boundsOf(kind) {
  const parts = [];
  const add = (word, value) => { if (value !== undefined && Math.abs(value) < LARGEST) parts.push(`${word} ${value}`); };
  add("≥", kind.minimum);
  add(">", kind.exclusiveMinimum);
  add("≤", kind.maximum);
  add("<", kind.exclusiveMaximum);
  add("entries ≤", kind.maxItems ?? kind.maxProperties);
  add("characters ≤", kind.maxLength);
  return parts.join(", ");
}

/** Returns a text whose parts in backticks are code. */
const withCode = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));

/** Reads what was typed: {value}, undefined for nothing; or {fault}. */
export function parse(kind, text) {
  if (text.trim() === "") return { value: undefined };
  if (kind.type === "number" || kind.type === "integer") return parseNumber(kind, Number(text));
  if (kind.type === "boolean") return { value: text === "true" };
  if (kind.type === "array" && kind.items?.type === "string") return { value: text.split("\n").filter((line) => line !== "") };
  if (kind.type === "array" && kind.items?.type === "integer") {
    const ids = text.split(/[\s,]+/).filter(Boolean).map(Number);
    return ids.every(Number.isInteger) ? { value: ids } : { fault: "must be whole numbers, with commas between them" };
  }
  if (kind.type === "object" || kind.type === "array") {
    try {
      return { value: JSON.parse(text) };
    } catch (error) {
      return { fault: `is not JSON: ${error.message}` };
    }
  }
  return { value: text };
}

function parseNumber(kind, value) {
  if (!Number.isFinite(value)) return { fault: "must be a number" };
  if (kind.type === "integer" && !Number.isInteger(value)) return { fault: "must be a whole number" };
  const isOut = value < (kind.minimum ?? -Infinity) || value > (kind.maximum ?? Infinity) || value <= (kind.exclusiveMinimum ?? -Infinity) || value >= (kind.exclusiveMaximum ?? Infinity);
  return isOut ? { fault: `must be ${boundsOf(kind)}` } : { value };
}

function written(kind, value) {
  if (value === undefined || value === null) return "";
  if (kind.type === "array" && kind.items?.type === "string") return [value].flat().join("\n");
  if (kind.type === "array" && kind.items?.type === "integer") return [value].flat().join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function control(parameter, id, value, standard) {
  const { kind } = parameter, shared = { id, "aria-describedby": `${id}-about`, name: parameter.name };
  if (kind.type === "boolean" || kind.enum) {
    const options = kind.enum || ["true", "false"];
    const select = make("select", shared, make("option", { value: "" }, `default (${standard})`), ...options.map((one) => make("option", { value: one }, one)));
    select.value = written(kind, value);
    return select;
  }
  const isLong = kind.type === "object" || (kind.type === "array" && kind.items?.type !== "integer");
  const attributes = { ...shared, placeholder: standard, value: written(kind, value), spellcheck: "false", autocomplete: "off" };
  if (isLong) return make("textarea", { ...attributes, rows: 2 });
  return make("input", { ...attributes, inputmode: kind.type === "integer" ? "numeric" : kind.type === "number" ? "decimal" : "text" });
}

/**
 * Returns a form: {element, showFault(name, message)}. `settings` is changed in place; `onChange()` is called then.
 * `mode`: "chat" or "completion", whose defaults are shown.
 */
export function settingsForm(parameters, settings, onChange, mode, prefix = "field") {
  const rows = new Map();

  function row(parameter) {
    const id = `${prefix}-${parameter.name}`, { kind } = parameter;
    const standard = written(kind, parameter.defaults[mode]) || UNSET[parameter.name] || "none";
    const input = control(parameter, id, settings[parameter.name], standard);
    const slider = hasRange(parameter) ? make("input", { type: "range", min: least(kind), max: endOf(parameter), step: (endOf(parameter) - least(kind)) / SLIDER_STEPS, value: settings[parameter.name] ?? parameter.defaults[mode], "aria-label": `${labelOf(parameter.name)}, slider`, tabindex: -1 }) : null;
    const fault = make("p", { class: "fault", role: "alert", hidden: true });
    const about = make("p", { class: "about", id: `${id}-about` }, ...withCode(parameter.meaning), make("span", { class: "bounds" }, boundsOf(kind)));
    const clear = button("default", () => { input.value = ""; read(); input.focus(); }, { class: "clear", hidden: true, "aria-label": `${labelOf(parameter.name)}: back to the default` });
    const element = make("div", { class: "field" }, make("div", { class: "field-head" }, make("label", { for: id }, labelOf(parameter.name), " ", make("code", {}, parameter.name)), clear), make("div", { class: "field-input" }, input, slider), fault, about);
    function show(message) {
      fault.textContent = message && `${parameter.name} ${message}`;
      fault.hidden = !message;
      input.setAttribute("aria-invalid", String(Boolean(message)));
    }
    function mark() {
      const isSet = settings[parameter.name] !== undefined;
      element.classList.toggle("set", isSet);
      clear.hidden = !isSet;
      if (slider) slider.value = settings[parameter.name] ?? parameter.defaults[mode];
    }
    function read() {
      const { value, fault: message } = parse(kind, input.value);
      show(message || "");
      element.classList.toggle("unread", Boolean(message));
      if (message) return;
      if (value === undefined) delete settings[parameter.name];
      else settings[parameter.name] = value;
      mark();
      onChange();
    }
    input.addEventListener("input", read);
    slider?.addEventListener("input", () => { input.value = String(Number(Number(slider.value).toPrecision(4))); read(); });
    mark();
    rows.set(parameter.name, (message) => { show(message); element.closest("details").open = true; input.focus(); });
    return element;
  }

  const element = make("div", { class: "fields" });
  for (const [title, members] of groupedBy(parameters)) {
    element.append(make("details", { open: title === FIRST_GROUP }, make("summary", {}, title), ...members.map(row)));
  }
  return {
    element,
    showFault(name, message) { rows.get(name)?.(message); return rows.has(name); },
  };
}

/** Returns the parameters by group: first those that most people use. */
function groupedBy(parameters) {
  const often = OFTEN_USED.map((name) => parameters.find((one) => one.name === name)).filter(Boolean);
  const groups = new Map(often.length ? [[FIRST_GROUP, often]] : []);
  for (const one of parameters) if (!often.includes(one)) groups.set(one.group, [...(groups.get(one.group) || []), one]);
  return groups;
}
