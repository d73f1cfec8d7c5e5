// Anthropic's official JavaScript client.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { CAPITAL, LONG, WEATHER, check, done, leaves, url } from "./questions.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const ask = (content, more = {}) => ({ model: "default", max_tokens: 100, messages: [{ role: "user", content }], ...more });
const tool = { name: "get_weather", input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } };

const whole = await client.messages.create(ask(CAPITAL, { temperature: 0 }));
await check("a message", () => assert.match(whole.content[0].text, /Paris/));
await check("a streamed message is the same", async () => {
  const stream = client.messages.stream(ask(CAPITAL, { temperature: 0 }));
  assert.equal(await stream.finalText(), whole.content[0].text);
});
for (const type of ["any", "tool"]) {
  await check(`a tool that is demanded: ${type}`, async () => {
    const tool_choice = type === "tool" ? { type, name: tool.name } : { type };
    const answer = await client.messages.create(ask(WEATHER, { tools: [tool], tool_choice }));
    const call = answer.content.find((block) => block.type === "tool_use");
    assert.deepEqual(Object.keys(call.input), ["city"]);
  });
}
await check("a tool that is offered", async () => {
  const answer = await client.messages.create(ask(WEATHER, { tools: [{ ...tool, strict: true }] }));
  assert.ok(answer.content.length);
});
await check("the runner calls a tool and sends its result", async () => {
  const asked = [];
  const run = ({ city }) => `It is sunny in ${asked[asked.push(city) - 1]}.`;
  const runner = client.beta.messages.toolRunner(ask(WEATHER, {
    tools: [betaTool({ name: tool.name, description: "The weather in a city", inputSchema: tool.input_schema, run })],
    tool_choice: { type: "any" },
    max_iterations: 2,
  }));
  const answers = [];
  for await (const message of runner) answers.push(message);
  assert.equal(answers.length, 2);
  assert.equal(typeof asked[0], "string");
});
await check("tokens are counted", async () => {
  const counted = await client.messages.countTokens({ model: "default", messages: [{ role: "user", content: CAPITAL }] });
  assert.equal(counted.input_tokens, whole.usage.input_tokens + (whole.usage.cache_read_input_tokens ?? 0));
});
await check("an error names the field", () =>
  assert.rejects(client.messages.create(ask(CAPITAL, { temperature: 7 })), (error) => error instanceof Anthropic.BadRequestError && /temperature/.test(error.message)));
await check("a stream that is left is aborted", () => leaves(async () => {
  const stream = await client.messages.create(ask(LONG, { max_tokens: 4000, stream: true }));
  for await (const event of stream) if (event.type === "content_block_delta") break;
}));
done();
