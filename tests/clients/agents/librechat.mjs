// Asks once as LibreChat's server does for an endpoint of its librechat.yaml: `node librechat.mjs CONFIG '{"prompt": …}'`.
import { readFileSync } from "node:fs";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { Providers, Run } from "@librechat/agents";
import yaml from "js-yaml";
import { configSchema } from "librechat-data-provider";
import { z } from "zod";

const [config, asked] = process.argv.slice(2);
const { prompt, ...settings } = JSON.parse(asked);
const [endpoint] = configSchema.strict().parse(yaml.load(readFileSync(config, "utf-8"))).endpoints.custom;
const connection = { model: endpoint.models.default[0], apiKey: endpoint.apiKey, configuration: { baseURL: endpoint.baseURL } };
const weather = tool(async ({ city }) => `It is sunny in ${city}.`, { name: "get_weather", description: "The weather in a city", schema: z.object({ city: z.string() }) });
const run = await Run.create({
  runId: crypto.randomUUID(),
  graphConfig: { type: "standard", instructions: "You are brief.", tools: [weather], llmConfig: { provider: Providers.OPENAI, ...connection, ...settings } },
  returnContent: true,
});
const how = { runId: crypto.randomUUID(), streamMode: "values", version: "v2", configurable: { thread_id: "one" } };
console.log(JSON.stringify(await run.processStream({ messages: [new HumanMessage(prompt)] }, how)));
