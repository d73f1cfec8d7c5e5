// Mastra's agents, over a server that is like OpenAI's.
import assert from "node:assert/strict";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { CAPITAL, City, DESCRIBE, Person, WEATHER, check, done, url } from "./questions.mjs";

const model = { id: "tureen/default", url: `${url}/v1`, apiKey: "none" };
const weather = createTool({ id: "get_weather", description: "The weather in a city", inputSchema: City, execute: async () => ({ weather: "sunny" }) });
const make = (more) => new Agent({ id: "assistant", name: "assistant", instructions: "You are brief.", model, ...more });
const modelSettings = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

await check("an agent answers", async () => assert.match((await make({}).generate(CAPITAL, { modelSettings })).text, /\w/));
await check("an agent streams", async () => {
  let text = "";
  for await (const piece of (await make({}).stream(CAPITAL, { modelSettings })).textStream) text += piece;
  assert.match(text, /\w/);
});
await check("an agent with a tool ends", async () => {
  const answer = await make({ tools: { weather } }).generate(WEATHER, { modelSettings, maxSteps: 2 });
  assert.ok(answer.finishReason);
});
await check("an agent gives an object", async () => {
  const answer = await make({}).generate(DESCRIBE, { modelSettings, structuredOutput: { schema: Person } });
  Person.parse(answer.object);
});
done();
