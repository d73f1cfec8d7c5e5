// OpenAI's SDK (JavaScript).
import assert from "node:assert/strict";
import OpenAI from "openai";
import { LONG, check, done, leaves, url } from "./questions.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is the capital city of France? Answer in one sentence." }];
const chat = { model, messages, max_tokens: 24, temperature: 0 };
const tools = [{ type: "function", function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

const whole = await client.chat.completions.create(chat);
await check("a chat", () => assert.match(whole.choices[0].message.content, /Paris/));
await check("a streamed chat is the same text", async () => {
  let text = "", usage;
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});
await check("the stream helper", async () => {
  const final = await client.chat.completions.stream({ ...chat, tools, tool_choice: "required", max_tokens: 100 }).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
  assert.deepEqual(Object.keys(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments)), ["city"]);
});
await check("a schema", async () => {
  const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
  const answer = await client.chat.completions.create({ ...chat, max_tokens: 100, response_format: { type: "json_schema", json_schema: { name: "city", schema } } });
  assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)), ["city"]);
});
await check("a completion", async () => {
  const answer = await client.completions.create({ model, prompt: "The capital of France is", max_tokens: 8, temperature: 0, logprobs: 1 });
  assert.match(answer.choices[0].text, /Paris/);
  assert.equal(answer.choices[0].logprobs.tokens.length, 8);
});
await check("a response", async () => {
  const answer = await client.responses.create({ model, input: messages[0].content, max_output_tokens: 24, temperature: 0 });
  assert.match(answer.output_text, /Paris/);
});
await check("an error has its class and names the field", async () => {
  await assert.rejects(client.chat.completions.create({ ...chat, temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
});
await check("a stream that is left is aborted", () => leaves(async () => {
  for await (const _ of await client.chat.completions.create({ ...chat, messages: [{ role: "user", content: LONG }], max_tokens: 4000, stream: true })) break;
}));
done();
