// The server: its models and what they do by default, whether it answers, and its key.

import { ApiError, ask, getKey, setKey } from "./api.js";
import { announce, byId, dialog, make } from "./dom.js";
import { ofModel } from "./answer.js";
import { parametersOf } from "./fields.js";

const PROBE_MS = 2000, WATCH_MS = 1000;
const STATES = { unloaded: "not loaded", loading: "loading …", unloading: "being unloaded" };
const NOTHING_DECLARED = { components: { schemas: { SamplingParams: { properties: {} } } } };

/**
 * Returns {connect, follow, watch, showLink, askForKey}. Writes parameters, models, canSee and contextLength of
 * `state`. `onLearnt()` is called when they have changed, `onModels()` when the state of a model has; `isWaiting()`:
 * whether an answer waits for its first token.
 */
export function connection(state, { onLearnt, onModels, isWaiting }) {
  const choice = byId("model");
  let learnt, numLearning = 0, probing = 0, watching = 0;

  async function connect() {
    try {
      const [openapi, models] = await Promise.all([state.parameters.length ? null : ask("openapi.json"), ask("v1/models")]);
      if (openapi) state.parameters = parametersOf(openapi);
      state.models = models.data;
      showModels();
      await learn(choice.value);
      showLink(false);
      return true;
    } catch (error) {
      if (!state.parameters.length) state.parameters = parametersOf(await ask("openapi.json").catch(() => NOTHING_DECLARED));
      if (!(error instanceof ApiError)) showLink(true);
      return false;
    }
  }

  function showModels() {
    const option = (one, name) => make("option", { value: one.id }, STATES[one.status] ? `${name} (${STATES[one.status]})` : name);
    const adapters = (id) => state.models.filter((one) => one.parent === id);
    const options = state.models.filter((one) => !one.parent).flatMap((one) => [option(one, one.id), ...adapters(one.id).map((adapter) => option(adapter, `${one.id} + ${adapter.id}`))]);
    if (options.map((one) => one.textContent).join("\n") !== [...choice.options].map((one) => one.textContent).join("\n")) choice.replaceChildren(...options);
    if (state.current?.model && state.models.some((one) => one.id === state.current.model)) choice.value = state.current.model;
    else if (state.current) state.current.model = choice.value;
  }

  /** Shows how models are loaded, until none is and no answer waits for one. A server with one model has no states. */
  async function watch() {
    clearTimeout(watching);
    if (!state.models.some((one) => one.status)) return;
    const models = await ask("v1/models").catch(() => null);
    if (models) { state.models = models.data; showModels(); onModels(); }
    clearTimeout(watching);
    if (numLearning || isWaiting() || state.models.some((one) => ["loading", "unloading"].includes(one.status))) watching = setTimeout(watch, WATCH_MS);
  }

  /** Learns what a model sees, how long its context is, and what acts where nothing is set. */
  async function learn(model) {
    learnt = model;
    numLearning += 1;
    const [facts, effective] = await Promise.all([ask(`model_info${ofModel(model)}`).catch(() => ({})), defaultsOf(model)]);
    numLearning -= 1;
    if (learnt !== model) return;
    state.canSee = Boolean(facts.has_image_understanding);
    state.contextLength = facts.context_length ?? 0;
    state.parameters = state.parameters.map((one) => (effective[one.name] && !["max_new_tokens", "sampling_seed"].includes(one.name) ? { ...one, defaults: { chat: effective[one.name].value, completion: effective[one.name].value } } : one));
  }

  /** Learns of the model that is chosen now. */
  async function follow() {
    const model = choice.value;
    if (learnt === model) return;
    watch();
    await learn(model);
    if (learnt === model) onLearnt();
  }

  /** Returns what acts where nothing is set, which the model's authors or the operator may have set: asks for an answer of no tokens. */
  async function defaultsOf(model) {
    const body = { ...(model ? { model } : {}), messages: [{ role: "user", content: " " }], max_tokens: 0, return_effective: true, log_metrics: false };
    const answered = await ask("v1/chat/completions", body).catch(() => null);
    return answered?.choices[0].effective ?? {};
  }

  function showLink(isLost) {
    byId("link").textContent = isLost ? "connection lost" : "";
    if (!isLost) { clearTimeout(probing); probing = 0; return; }
    probing ||= setTimeout(async () => {
      probing = 0;
      const answered = await ask("health").then(() => true, (error) => error instanceof ApiError);
      if (!answered) showLink(true);
      else if (await connect()) onLearnt();
    }, PROBE_MS);
  }

  function askForKey(failure = null) {
    if (document.querySelector("dialog[open]")) return;
    const field = make("input", { type: "password", id: "key", autocomplete: "off", value: getKey() });
    const form = make("form", { class: "key-form", method: "dialog" }, make("label", { for: "key" }, "API key"), field,
      make("p", { class: "about" }, "It is kept until this tab is closed, and sent to this server only."), ...(failure ? [make("p", { class: "fault", role: "alert" }, failure.message)] : []), make("div", { class: "row" }, make("button", { type: "submit", class: "primary" }, "Use it")));
    const shownDialog = dialog("API key", form);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      setKey(field.value.trim());
      shownDialog.close();
      if (await connect()) announce("The server accepts this key");
      onLearnt();
    });
    field.focus();
  }

  return { connect, follow, watch, showLink, askForKey };
}
