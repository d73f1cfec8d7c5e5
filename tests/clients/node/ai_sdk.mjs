// Vercel's AI SDK, with its providers for servers that are like OpenAI's and for Anthropic's.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { CAPITAL, City, DESCRIBE, LONG, Person, WEATHER, calls, check, done, leaves, url } from "./questions.mjs";

const models = {
  openai: createOpenAICompatible({ name: "tureen", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true })("default"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("default"),
};
const tools = { get_weather: tool({ description: "The weather in a city", inputSchema: City, execute: ({ city }) => `It is sunny in ${city}.` }) };

for (const [name, model] of Object.entries(models)) {
  const asked = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const whole = await generateText({ ...asked, prompt: CAPITAL });
  await check(`${name}: a text`, () => assert.match(whole.text, /Paris/));
  await check(`${name}: a streamed text is the same`, async () => {
    let text = "";
    for await (const piece of streamText({ ...asked, prompt: CAPITAL }).textStream) text += piece;
    assert.equal(text, whole.text);
  });
  for (const toolChoice of ["auto", "required", { type: "tool", toolName: "get_weather" }]) {
    await check(`${name}: tools, ${JSON.stringify(toolChoice)}`, async () => {
      const answer = await generateText({ ...asked, prompt: WEATHER, tools, toolChoice, stopWhen: stepCountIs(1) });
      if (toolChoice !== "auto") assert.deepEqual(calls(answer.toolCalls, "input"), ["get_weather(city)"]);
    });
  }
  await check(`${name}: an object`, async () => {
    const answer = await generateText({ ...asked, prompt: DESCRIBE, output: Output.object({ schema: Person }) });
    Person.parse(answer.output);
  });
  await check(`${name}: an error names the field`, () => assert.rejects(generateText({ ...asked, prompt: CAPITAL, topP: 7 }), /top_p/));
  await check(`${name}: a stream that is left is aborted`, () => leaves(async () => {
    const left = new AbortController();
    const { textStream } = streamText({ ...asked, maxOutputTokens: 4000, prompt: LONG, abortSignal: left.signal, onError() {} });
    for await (const _ of textStream) left.abort();
  }));
}
done();
