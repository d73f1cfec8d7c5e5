// The panel of settings: system prompt, tools, constraint, and the sampling parameters.

import { button, make } from "./dom.js";
import { constraintBox, jsonFault } from "./constraint.js";
import { constraintsOf, settingsForm } from "./fields.js";

const TOOLS_EXAMPLE = [{ name: "weather", description: "The weather in a city.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];
const TOOL_CHOICES = { auto: "If it decides to", none: "Never", required: "Always" };

function systemField(conversation, onChange) {
  const area = make("textarea", { id: "system", rows: 3, value: conversation.system, placeholder: "The template's own, if any" });
  area.addEventListener("input", () => { conversation.system = area.value; onChange(); });
  return make("div", { class: "field" }, make("label", { for: "system" }, "System prompt"), area);
}

function toolFields(conversation, onChange) {
  const area = make("textarea", { id: "tools", rows: 4, value: conversation.tools, spellcheck: "false", placeholder: "A list of functions, as JSON", "aria-describedby": "tools-fault" });
  const fault = make("p", { class: "fault", id: "tools-fault", role: "status" });
  const choice = make("select", { id: "tool-choice" }, ...Object.entries(TOOL_CHOICES).map(([value, text]) => make("option", { value }, text)));
  choice.value = conversation.toolChoice;
  const read = () => {
    const found = area.value.trim() ? jsonFault(area.value) : null;
    fault.textContent = found ? found.message : "";
    area.setAttribute("aria-invalid", String(Boolean(found)));
    conversation.tools = found ? "" : area.value;
    onChange();
  };
  area.addEventListener("input", read);
  choice.addEventListener("change", () => { conversation.toolChoice = choice.value; onChange(); });
  const example = button("Example", () => { area.value = JSON.stringify(TOOLS_EXAMPLE, null, 2); read(); }, { class: "clear" });
  return make("details", { open: Boolean(conversation.tools) }, make("summary", {}, "Tools"),
    make("div", { class: "field" }, make("div", { class: "field-head" }, make("label", { for: "tools" }, "Functions ", make("code", {}, "tools")), example), area, fault),
    make("div", { class: "field" }, make("label", { for: "tool-choice" }, "The model calls a function ", make("code", {}, "tool_choice")), choice));
}

/**
 * Fills the panel for a conversation. Returns {showFault(field, message): whether the field is here}.
 * `explain`: {get, set}, whether tokens are explained while they are drawn.
 */
export function showSettings({ conversation, parameters, onChange, modelOf, explain, head, fields }) {
  const constraints = constraintsOf(parameters);
  const box = constraintBox(constraints, conversation.settings, onChange, modelOf);
  const form = settingsForm(parameters.filter((one) => !constraints.includes(one)), conversation.settings, onChange, conversation.mode);
  const explained = make("input", { type: "checkbox", id: "explain", checked: explain.get() });
  explained.addEventListener("change", () => explain.set(explained.checked));
  head.replaceChildren(
    ...(conversation.mode === "chat" ? [systemField(conversation, onChange), toolFields(conversation, onChange)] : []),
    make("details", { open: constraints.some((one) => conversation.settings[one.name] !== undefined) }, make("summary", {}, "The answer must be"), box.element),
    make("div", { class: "field check" }, explained, make("label", { for: "explain" }, "Explain tokens as they are drawn")));
  fields.replaceChildren(form.element);
  return {
    showFault(field, message) {
      if (!box.names.includes(field)) return form.showFault(field, message.replace(new RegExp(`^${field}:? `), ""));
      box.element.closest("details").open = true;
      box.showFault(message);
      return true;
    },
  };
}
