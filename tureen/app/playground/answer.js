// Runs a request and writes what comes into nodes.
//
// An assistant's node gets: made {model, settings, system, tools, toolChoice, from, seed, explain, kept, keptText}, text,
// reasoning, calls, tokens [{id, text, logprob, by, bytes?}], figures {ttft, rate, prompt, cached, completion}, finish,
// error, isDown (no server answered), state: "waiting" | "running" | "lost" | "done" | "stopped" | "failed".

import { ask, randomSeed, ServerDown, stream } from "./api.js";
import { fullBody, MAX_EXPLAINED, parsedTools, routeOf } from "./request.js";
import { hasPictures, messages, prompt, sentBefore } from "./conversation.js";

const explanations = new Map(); // node id -> token index -> explanation; not kept: it can be asked for again
const promptIds = new Map(); // node id -> token ids of its prompt, of those that were used last
const MOST_PROMPTS = 64;

/** Returns what an answer is to be made with: the conversation's settings as they are now. */
export function making(conversation, explain = true) {
  const settings = { ...conversation.settings };
  const seed = settings.sampling_seed ?? randomSeed();
  delete settings.sampling_seed;
  return {
    model: conversation.model, system: conversation.system, tools: conversation.tools, toolChoice: conversation.toolChoice,
    from: conversation.from ?? "", settings, seed, kept: [], keptText: "", explain: explain && (settings.max_new_tokens ?? Infinity) * (settings.n ?? 1) <= MAX_EXPLAINED,
  };
}

/** Empties a node, up to what a branch keeps. */
export function reset(node) {
  const { kept, keptText } = node.made;
  Object.assign(node, { text: keptText, reasoning: "", calls: [], tokens: [...kept], figures: {}, finish: "", error: "", isDown: false, state: "waiting" });
  explanations.delete(node.id);
}

/**
 * Fills `node`. `more(index)` returns a new node for another choice, where n is larger than 1; `onChange(node)` is
 * called after each change. `isPatient`: waits for a server that does not answer yet. Never throws: what goes wrong is
 * in the node.
 */
export async function run(conversation, node, { signal, onChange, more, isPatient = false }) {
  reset(node);
  const sentAt = performance.now();
  const nodes = [node];
  const nodeOf = (index) => {
    while (nodes.length <= index) {
      const another = more(nodes.length);
      reset(another);
      nodes.push(another);
    }
    return nodes[index];
  };
  try {
    const ids = node.made.kept.length ? await promptIdsOf(conversation, node) : [];
    const body = fullBody(conversation, node, ids);
    const onState = (state) => { for (const one of nodes) one.state = state === "lost" ? "lost" : "running"; nodes.forEach(onChange); };
    for await (const chunk of stream(routeOf(conversation), body, { signal, onState, isPatient })) {
      if (chunk.again) nodes.forEach((one) => { reset(one); onChange(one); });
      else take(chunk, nodeOf, sentAt, onChange);
    }
    for (const one of nodes) await readCalls(one);
    settle(nodes, "done");
  } catch (error) {
    if (signal.aborted) settle(nodes, "stopped");
    else {
      node.error = error.message;
      node.errorField = error.field || "";
      node.isDown = error instanceof ServerDown;
      settle(nodes, "failed");
    }
  }
  nodes.forEach(onChange);
  return nodes;
}

function settle(nodes, state) {
  for (const node of nodes) if (node.state !== "done") node.state = state;
}

function take(chunk, nodeOf, sentAt, onChange) {
  for (const choice of chunk.choices) {
    const node = nodeOf(choice.index);
    const ids = chunk.prompt_token_ids || choice.prompt_token_ids;
    if (ids && !node.made.kept.length) keepPrompt(node.id, ids);
    const delta = choice.delta || { content: choice.text };
    if (node.state === "waiting") node.state = "running";
    node.text += delta.content || "";
    node.reasoning += delta.reasoning_content || "";
    (delta.tool_calls || []).forEach((piece) => takeCall(node, piece));
    takeTokens(node, choice, sentAt);
    if (choice.finish_reason) node.finish = choice.finish_reason;
    if (choice.meta_info?.decode_throughput) node.figures.rate = choice.meta_info.decode_throughput; // the server's: a page may read many tokens at once
    onChange(node);
  }
  if (chunk.usage && !chunk.choices.length) {
    const node = nodeOf(0);
    Object.assign(node.figures, { prompt: chunk.usage.prompt_tokens, cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 });
    onChange(node);
  }
}

function takeCall(node, piece) {
  const call = (node.calls[piece.index] ??= { id: "", name: "", arguments: "" });
  call.id = piece.id || call.id;
  const said = piece.function || piece.custom || {};
  call.name += said.name || "";
  call.arguments += said.arguments || said.input || "";
}

function takeTokens(node, choice, sentAt) {
  const { token_ids: ids = [], logprobs, explanations: reasons = [] } = choice;
  const listed = logprobs?.content || (logprobs?.tokens || []).map((token, index) => ({ token, logprob: logprobs.token_logprobs[index] }));
  ids.forEach((id, index) => {
    const { token = "", logprob = null, bytes } = listed[index] || {};
    const made = { id, text: token, logprob };
    if (token.includes("\ufffd") && bytes) made.bytes = bytes;
    if (reasons[index]) {
      made.by = reasons[index].chosen_by;
      explanationsOf(node).set(node.tokens.length, reasons[index]);
    }
    node.tokens.push(made);
  });
  const { figures } = node, count = node.tokens.length - node.made.kept.length;
  if (!ids.length) return;
  figures.ttft ??= (performance.now() - sentAt) / 1000;
  figures.completion = count;
}

/** Finds calls that began among the tokens which a branch keeps: the server has seen only what came after these. */
async function readCalls(node) {
  if (!node.made.kept.length || !parsedTools(node.made.tools).length) return;
  const found = await ask(`parse_function_call${ofModel(node.made.model)}`, { text: node.text, tools: parsedTools(node.made.tools) });
  node.text = found.normal_text;
  node.calls = found.calls.map((call, index) => ({ id: `call_${index}`, name: call.name, arguments: call.parameters }));
}

const explanationsOf = (node) => explanations.get(node.id) || explanations.set(node.id, new Map()).get(node.id);

/**
 * Returns a token's explanation; null for one that a branch keeps or the user took. What is not there is asked for: the
 * same request with the same seed draws the same tokens. Throws ApiError; Error where the tokens differ.
 */
export async function explanationOf(conversation, node, index) {
  if (index < node.made.kept.length) return null;
  const known = explanationsOf(node);
  if (known.has(index)) return known.get(index);
  const again = { ...node, made: { ...node.made, explain: true, settings: { ...node.made.settings, n: 1 } } };
  const ids = node.made.kept.length ? await promptIdsOf(conversation, node) : [];
  const body = { ...fullBody(conversation, again, ids), n: 1 };
  const stopping = new AbortController();
  let place = node.made.kept.length;
  for await (const chunk of stream(routeOf(conversation), body, { signal: stopping.signal, onState: () => {} })) {
    for (const reason of chunk.choices.flatMap((choice) => choice.explanations || [])) {
      if (reason.token_id !== node.tokens[place]?.id) {
        stopping.abort();
        throw new Error("The server now answers differently: another model, or other weights, than when this was made.");
      }
      known.set(place++, reason);
    }
    if (known.has(index)) { stopping.abort(); break; }
  }
  return known.get(index) ?? null;
}

function keepPrompt(id, ids) {
  promptIds.delete(id); // what is set again comes last
  promptIds.set(id, ids);
  if (promptIds.size > MOST_PROMPTS) promptIds.delete(promptIds.keys().next().value);
}

/** Returns the token ids of the prompt that leads to `node`. */
export async function promptIdsOf(conversation, node) {
  const known = promptIds.get(node.id);
  if (known) {
    keepPrompt(node.id, known);
    return known;
  }
  const nodes = sentBefore(conversation, node), tools = parsedTools(node.made.tools);
  if (hasPictures(nodes)) return [];
  const body = conversation.mode === "chat"
    ? { messages: messages(nodes, node.made.system), ...(tools.length ? { tools, tool_choice: node.made.toolChoice } : {}) }
    : { prompt: prompt(nodes) };
  const { tokens } = await ask("v1/tokenize", { ...named(node.made.model), ...body });
  keepPrompt(node.id, tokens);
  return tokens;
}

const named = (model) => (model ? { model } : {});

/** Returns the query that names a model, for routes whose bodies do not. */
export const ofModel = (model) => (model ? `?${new URLSearchParams({ model })}` : "");

/** Returns the text of a model's token ids: their texts alone are no letters where a letter has several tokens. */
export async function textOf(ids, model) {
  return ids.length ? (await ask("v1/detokenize", { ...named(model), tokens: ids })).prompt : "";
}

export async function textsOf(ids, model) {
  return ids.length ? (await ask("v1/detokenize", { ...named(model), tokens: ids.map((id) => [id]), skip_special_tokens: false })).prompt : [];
}
