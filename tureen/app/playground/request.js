// Makes the body of a request from a conversation and the answer that is wanted.

import { hasPictures, messages, prompt, sentBefore } from "./conversation.js";

export const MAX_EXPLAINED = 16384;

export const routeOf = (conversation) => (conversation.mode === "chat" ? "v1/chat/completions" : "v1/completions");

/** Returns the conversation's own part: what is said, and how it is to be answered. Other programs can send it, too. */
export function plainBody(conversation, node) {
  const { made } = node, nodes = sentBefore(conversation, node);
  const body = { ...(made.model ? { model: made.model } : {}) };
  if (conversation.mode === "chat") {
    body.messages = messages(nodes, made.system);
    const tools = parsedTools(made.tools);
    if (tools.length) Object.assign(body, { tools, tool_choice: made.toolChoice });
  } else {
    body.prompt = prompt(nodes);
  }
  return { ...body, ...made.settings, sampling_seed: made.seed };
}

/** Returns the whole body: the tokens that a branch keeps, and what the page wants to know of each token. */
export function fullBody(conversation, node, promptIds) {
  const { kept, explain } = node.made;
  const body = plainBody(conversation, node);
  const isChat = conversation.mode === "chat";
  if (kept.length && isChat && hasPictures(sentBefore(conversation, node))) {
    body.messages.push({ role: "assistant", content: node.made.keptText });
    body.continue_final_message = true;
  } else if (kept.length) {
    const ids = [...promptIds, ...kept.map((token) => token.id)];
    delete body.messages;
    if (isChat) body.input_ids = ids;
    else body.prompt = ids;
  }
  return {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    return_meta_info: true,
    logprobs: isChat ? true : 0,
    ...(explain ? { explain: true } : {}),
  };
}

/** Returns the tools that a text declares; throws SyntaxError for a text that does not. */
export function parsedTools(text) {
  if (!text.trim()) return [];
  const found = JSON.parse(text);
  return (Array.isArray(found) ? found : [found]).map((tool) => (tool.function || tool.type === "custom" ? tool : { type: "function", function: tool }));
}
