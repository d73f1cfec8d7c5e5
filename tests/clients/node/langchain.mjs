// LangChain and LangGraph in JavaScript, over OpenAI's and Anthropic's forms.
import assert from "node:assert/strict";
import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { CAPITAL, City, DESCRIBE, LONG, Person, WEATHER, calls, check, done, leaves, url } from "./questions.mjs";

const settings = { model: "default", apiKey: "none", temperature: 0, maxTokens: 200, maxRetries: 0 };
const chats = {
  openai: new ChatOpenAI({ ...settings, configuration: { baseURL: `${url}/v1` } }),
  anthropic: new ChatAnthropic({ ...settings, anthropicApiUrl: url }),
};
const weather = tool(({ city }) => `It is sunny in ${city}.`, { name: "get_weather", description: "The weather in a city", schema: City });

for (const [name, chat] of Object.entries(chats)) {
  const whole = await chat.invoke(CAPITAL);
  await check(`${name}: a chat`, () => assert.match(whole.text, /Paris/));
  await check(`${name}: a streamed chat is the same`, async () => {
    let text = "";
    for await (const chunk of await chat.stream(CAPITAL)) text += chunk.text;
    assert.equal(text, whole.text);
  });
  for (const tool_choice of ["auto", "any", "get_weather"]) {
    await check(`${name}: tools, ${tool_choice}`, async () => {
      const answer = await chat.bindTools([weather], { tool_choice }).invoke(WEATHER);
      if (tool_choice !== "auto") assert.deepEqual(calls(answer.tool_calls, "args"), ["get_weather(city)"]);
    });
  }
  await check(`${name}: an object`, async () => {
    Person.parse(await chat.withStructuredOutput(Person, name === "openai" ? { method: "jsonSchema" } : {}).invoke(DESCRIBE));
  });
  await check(`${name}: an agent with a tool ends`, async () => {
    const state = await createReactAgent({ llm: chat, tools: [weather] }).invoke({ messages: [{ role: "user", content: WEATHER }] }, { recursionLimit: 8 });
    assert.ok(state.messages.length > 1);
  });
  await check(`${name}: an error names the field`, () => assert.rejects(chat.withConfig({}).invoke([{ role: "user", content: CAPITAL }], { stop: [""] }), /stop/));
  await check(`${name}: a stream that is left is aborted`, () => leaves(async () => {
    const long = name === "openai" ? new ChatOpenAI({ ...settings, maxTokens: 4000, configuration: { baseURL: `${url}/v1` } }) : new ChatAnthropic({ ...settings, maxTokens: 4000, anthropicApiUrl: url });
    const left = new AbortController();
    try {
      for await (const chunk of await long.stream(LONG, { signal: left.signal })) if (chunk.text) left.abort();
    } catch (error) {
      assert.match(`${error.name} ${error.message}`, /[Aa]bort/);
    }
  }));
}
done();
