// Writes a request as a program: curl, Python's standard library, and the libraries of OpenAI, Anthropic and Ollama.

import { button, copy, dialog, make, tabs } from "./dom.js";
import { getKey } from "./api.js";
import { plainBody, routeOf } from "./request.js";

const KEY = 'os.environ["TUREEN_KEY"]'; // programs name where the key is, and never have it
const STANDARD = ["model", "messages", "prompt", "tools", "tool_choice", "temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "stop"];
const OLLAMA_NAMES = { max_new_tokens: "num_predict", repetition_penalty: "repeat_penalty", sampling_seed: "seed" };
const OLLAMA_OPTIONS = ["num_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "repeat_penalty", "presence_penalty", "frequency_penalty"];

/** Writes a JSON value as Python does. */
export function python(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value);
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${inner}${python(one, inner)},\n`).join("")}${indent}]` : "[]";
  if (typeof value === "object") return `{${Object.entries(value).length ? `\n${Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${python(one, inner)},\n`).join("")}${indent}` : ""}}`;
  return String(value);
}

const keywords = (fields) => Object.entries(fields).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");

function curl(base, route, body, hasKey) {
  // the body is no argument: a picture would be too long for one; no line of JSON is END
  const parts = [`curl ${base}/${route}`, ...(hasKey ? ['-H "Authorization: Bearer $TUREEN_KEY"'] : []), "-H 'Content-Type: application/json'", "--data-binary @- <<'END'"];
  return `${parts.join(" \\\n  ")}\n${JSON.stringify(body, null, 2)}\nEND\n`;
}

function standardLibrary(base, route, body, hasKey) {
  return `import json
${hasKey ? "import os\n" : ""}import urllib.request

body = ${python(body)}
headers = {"Content-Type": "application/json"${hasKey ? `, "Authorization": "Bearer " + ${KEY}` : ""}}
request = urllib.request.Request("${base}/${route}", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as answer:
    choice = json.load(answer)["choices"][0]
print(${route.includes("chat") ? 'choice["message"]["content"]' : 'choice["text"]'})
`;
}

function openai(base, isChat, body, hasKey) {
  const known = {}, other = {};
  for (const [name, value] of Object.entries({ model: "default", ...body })) (STANDARD.includes(name) ? known : other)[name] = value;
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=${hasKey ? KEY : '"none"'})
answer = client.${isChat ? "chat.completions" : "completions"}.create(
${keywords({ ...known, extra_body: other })})
print(answer.choices[0].${isChat ? "message.content" : "text"})
`;
}

function anthropicContent(content) {
  if (!Array.isArray(content)) return content;
  return content.map((part) => {
    if (part.type !== "image_url") return part;
    const [, media, data] = part.image_url.url.match(/^data:([^;]+);base64,(.*)$/s) || [null, "", part.image_url.url];
    return { type: "image", source: { type: "base64", media_type: media, data } };
  });
}

function anthropicMessage(message) {
  if (message.role === "tool") return { role: "user", content: [{ type: "tool_result", tool_use_id: message.tool_call_id, content: message.content }] };
  if (!message.tool_calls) return { role: message.role, content: anthropicContent(message.content) };
  const text = message.content ? [{ type: "text", text: message.content }] : [];
  return { role: "assistant", content: [...text, ...message.tool_calls.map((call) => ({ type: "tool_use", id: call.id, name: call.function.name, input: JSON.parse(call.function.arguments) }))] };
}

function anthropic(base, isChat, body, hasKey) {
  const { model = "default", max_new_tokens: limit = 4096, sampling_seed: seed, stop, tools, tool_choice: choice, ...rest } = body;
  const said = isChat ? body.messages : [{ role: "user", content: body.prompt }];
  if (tools?.some((tool) => !tool.function)) throw new Error("this API has no custom tools.");
  const system = said.find((message) => message.role === "system")?.content;
  const { messages: _, prompt: __, ...other } = rest; // the library's own names for sampling parameters came and went
  const fields = {
    model, max_tokens: limit, ...(system ? { system } : {}), messages: said.filter((message) => message.role !== "system").map(anthropicMessage),
    ...(stop ? { stop_sequences: [stop].flat() } : {}),
    ...(tools ? { tools: tools.map(({ function: tool }) => ({ name: tool.name, description: tool.description || "", input_schema: tool.parameters || { type: "object" } })) } : {}),
    ...(choice && choice !== "auto" ? { tool_choice: { type: choice === "required" ? "any" : choice } } : {}),
    extra_body: { seed, ...other },
  };
  return `${hasKey ? "import os\n\n" : ""}from anthropic import Anthropic

client = Anthropic(base_url="${base}", api_key=${hasKey ? KEY : '"none"'})
answer = client.messages.create(
${keywords(fields)})
print("".join(block.text for block in answer.content if block.type == "text"))
`;
}

function ollamaMessage(message) {
  if (message.role === "tool") return { role: "tool", content: message.content };
  const parts = Array.isArray(message.content) ? message.content : [{ type: "text", text: message.content }];
  const images = parts.filter((part) => part.type === "image_url").map((part) => part.image_url.url.replace(/^data:[^,]*,/, ""));
  const calls = message.tool_calls?.map((call) => ({ function: { name: call.function.name, arguments: JSON.parse(call.function.arguments) } }));
  return { role: message.role, content: parts.map((part) => part.text || "").join(""), ...(images.length ? { images } : {}), ...(calls ? { tool_calls: calls } : {}) };
}

function ollama(base, isChat, body, hasKey) {
  const options = {}, left = [];
  const { model = "default", messages, prompt, tools, tool_choice: _, json_schema: schema, ...rest } = body;
  for (const [name, value] of Object.entries(rest)) {
    const theirs = OLLAMA_NAMES[name] || name;
    if (OLLAMA_OPTIONS.includes(theirs)) options[theirs] = value;
    else left.push(name);
  }
  const headers = hasKey ? `, headers={"Authorization": "Bearer " + ${KEY}}` : "";
  const asked = isChat ? { messages: messages.map(ollamaMessage), ...(tools ? { tools } : {}) } : { prompt, raw: true };
  const note = left.length ? `# Ollama's library has no field for: ${left.join(", ")}\n` : "";
  return `${hasKey ? "import os\n\n" : ""}from ollama import Client

${note}client = Client(host="${base}"${headers})
answer = client.${isChat ? "chat" : "generate"}(
${keywords({ model, ...asked, options, ...(schema === undefined ? {} : { format: schema }) })})
print(answer${isChat ? ".message.content" : ".response"})
`;
}

/** Returns name -> program, for the request that makes `node`; where there can be none, why. */
function programs(conversation, node, base, hasKey) {
  const isChat = conversation.mode === "chat", route = routeOf(conversation);
  const written = (write, form) => {
    try {
      return write(base, form, plainBody(conversation, node), hasKey);
    } catch (error) {
      return `This request cannot be written so: ${error.message}`;
    }
  };
  return { curl: written(curl, route), Python: written(standardLibrary, route), openai: written(openai, isChat), anthropic: written(anthropic, isChat), ollama: written(ollama, isChat) };
}

export function showPrograms(conversation, node) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const found = programs(conversation, node, base, Boolean(getKey()));
  const code = make("pre", { id: "program", role: "tabpanel", tabindex: 0, "aria-labelledby": "program-curl" });
  const list = make("div", { class: "tabs", role: "tablist", "aria-label": "Program" }, ...Object.keys(found).map((name) => button(name, () => {}, { role: "tab", id: `program-${name}`, "aria-controls": "program", "aria-selected": "false" })));
  const note = node.made.kept.length ? make("p", { class: "muted" }, "This answer is a branch; the program asks for one from the beginning.") : null;
  const shown = dialog("This request as code", list, ...(note ? [note] : []), code, make("div", { class: "row" }, button("Copy", () => copy(code.textContent), { class: "primary" })));
  const select = tabs(list, (tab) => { code.textContent = found[tab.textContent]; code.setAttribute("aria-labelledby", tab.id); });
  select(list.firstElementChild);
  return shown;
}
