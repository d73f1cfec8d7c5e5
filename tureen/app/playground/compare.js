// Two to four settings side by side, on one prompt.

import { announce, button, make } from "./dom.js";
import { add, create } from "./conversation.js";
import { making, run } from "./answer.js";
import { showMarkdown } from "./markdown.js";
import { settingsForm } from "./fields.js";
import { labelOf } from "./labels.js";
import { showFigures } from "./turns.js";
import { tokenList } from "./tokens.js";

const LEAST = 2, MOST = 4;
const VARIANTS = [{ temperature: 0 }, { temperature: 0.7 }, { temperature: 1 }, { temperature: 1.3 }];

/**
 * Returns {element, stop}. `context`: parameters (to set), models, conversation (whose settings the columns begin with), view(),
 * explain(conversation, node, index), adopt(settings, model).
 */
export function compareView(context) {
  const { parameters, models, conversation } = context;
  const columns = [];
  const holder = make("div", { class: "columns" });
  const prompt = make("textarea", { rows: 3, "aria-label": "Prompt for all columns", placeholder: "One prompt for all columns" });
  const go = button("Run all", runAll, { class: "primary" });
  const stop = button("Stop", stopAll, { disabled: true });
  const more = button("Add a column", () => { addColumn(); announce(`${columns.length} columns`, { shown: false }); });
  const element = make("section", { class: "compare", "aria-label": "Settings side by side" }, make("div", { class: "compare-head" }, prompt, make("div", { class: "row" }, go, stop, more)), holder);

  function addColumn() {
    const index = columns.length;
    const own = create({ mode: conversation.mode, system: conversation.system, model: conversation.model, settings: { ...conversation.settings, ...VARIANTS[index] } });
    const title = make("h2", {});
    const model = make("select", { "aria-label": `Model of column ${index + 1}` }, ...models.map(({ id }) => make("option", { value: id }, id)));
    if (own.model) model.value = own.model;
    model.addEventListener("change", () => { own.model = model.value; });
    const name = () => { title.textContent = summary(own.settings); };
    const form = settingsForm(parameters, own.settings, name, own.mode, `column${index}`);
    for (const group of form.element.children) group.open = false;
    const output = make("div", { class: "output", "aria-live": "off" }), figures = make("dl", { class: "figures", hidden: true }), note = make("p", { class: "note bad", role: "alert", hidden: true });
    const adopt = button("Use these settings", () => context.adopt(own.settings, own.model));
    const column = { own, node: null, stopping: null, form, output, figures, note, index };
    column.element = make("section", { class: "column", "aria-label": `Column ${index + 1}` }, title, make("div", { class: "row" }, ...(models.length > 1 ? [model] : []), adopt), make("details", {}, make("summary", {}, "Settings"), form.element), note, figures, output);
    columns.push(column);
    holder.append(column.element);
    name();
    more.disabled = columns.length === MOST;
  }

  function show(column) {
    const { node, output } = column;
    showFigures(column.figures, node.figures);
    column.note.hidden = node.state !== "failed" && node.state !== "lost";
    column.note.textContent = node.state === "lost" ? "Connection lost. Reconnecting …" : node.error;
    if (context.view() === "tokens" && node.tokens.length) {
      if (!column.list) {
        column.list = tokenList(node, (index) => context.explain(column.own, node, index));
        output.replaceChildren(column.list.element);
      }
      return column.list.grow();
    }
    column.list = null;
    if (!column.prose?.isConnected) output.replaceChildren(column.prose = make("div", { class: "prose" }));
    showMarkdown(column.prose, node.text);
  }

  async function runColumn(column) {
    const { own } = column;
    Object.assign(own, { nodes: {}, selected: {} });
    const said = add(own, null, { role: "user", text: prompt.value });
    const made = making(own);
    made.settings.n = 1; // a column shows one answer
    column.node = add(own, said, { role: "assistant", made, state: "waiting", tokens: [], figures: {}, calls: [] });
    column.stopping = new AbortController();
    column.list = null;
    let frame = 0;
    const onChange = () => { frame ||= requestAnimationFrame(() => { frame = 0; show(column); }); };
    await run(own, column.node, { signal: column.stopping.signal, onChange });
    if (column.node.errorField && column.node.state === "failed") column.form.showFault(column.node.errorField, column.node.error.replace(`${column.node.errorField} `, ""));
  }

  async function runAll() {
    if (!prompt.value.trim()) return prompt.focus();
    go.disabled = true;
    stop.disabled = false;
    await Promise.all(columns.map(runColumn));
    go.disabled = false;
    stop.disabled = true;
    announce("All columns are complete", { shown: false });
  }

  function stopAll() { for (const column of columns) column.stopping?.abort(); }

  prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); runAll(); } });
  for (let index = 0; index < LEAST; index++) addColumn();
  return { element, stop: stopAll, redraw: () => columns.forEach((column) => { if (column.node) { column.prose = null; column.list = null; show(column); } }) };
}

function summary(settings) {
  const parts = Object.entries(settings).map(([name, value]) => `${labelOf(name)} ${typeof value === "object" ? "…" : value}`);
  return parts.join(", ") || "defaults";
}
