// OpenAI's SDK (JavaScript): responses, files and batches that are kept
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { check, done, url } from "./questions.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const question = "What is the capital city of France? Answer in one sentence.";
const short = { model: "default", max_output_tokens: 40, temperature: 0 };
const until = async (look, isThere) => {
  for (;;) {
    const value = await look();
    if (isThere(value)) return value;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
};

await check("a response is kept, continued and deleted", async () => {
  const first = await client.responses.create({ ...short, input: question });
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  const second = await client.responses.create({ ...short, input: "And of Spain?", previous_response_id: first.id });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens);
  const items = await client.responses.inputItems.list(second.id, { order: "asc" });
  assert.deepEqual(items.data.map((item) => item.role), ["user", "assistant", "user"]);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});
await check("an item is named in place of being sent", async () => {
  const first = await client.responses.create({ ...short, input: question });
  const named = await client.responses.create({ ...short, input: [{ type: "item_reference", id: first.output[0].id }, { role: "user", content: "Again." }] });
  assert.ok(named.usage.input_tokens > first.usage.output_tokens);
});
await check("a conversation grows", async () => {
  const conversation = await client.conversations.create();
  await client.responses.create({ ...short, input: "My name is Ada.", conversation: conversation.id });
  const answer = await client.responses.create({ ...short, input: "What is my name?", conversation: conversation.id });
  assert.equal(answer.conversation.id, conversation.id);
  assert.equal((await client.conversations.items.list(conversation.id)).data.length, 4);
});
await check("a response in the background is finished, and another cancelled", async () => {
  const begun = await client.responses.create({ ...short, input: question, background: true });
  const ended = await until(() => client.responses.retrieve(begun.id), (response) => response.status === "completed");
  assert.match(ended.output_text, /Paris/);
  const long = await client.responses.create({ ...short, input: "Count.", background: true, max_output_tokens: 4000 });
  assert.equal((await client.responses.cancel(long.id)).status, "cancelled");
});
await check("a batch of a file is run", async () => {
  const line = (name, temperature) => JSON.stringify({ custom_id: name, method: "POST", url: "/v1/chat/completions", body: { model: "default", messages: [{ role: "user", content: question }], max_tokens: 24, temperature } });
  const text = [line("right", 0), line("wrong", -1)].join("\n");
  const file = await client.files.create({ file: await toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
  assert.equal((await client.files.retrieve(file.id)).bytes, text.length);
  const begun = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
  const batch = await until(() => client.batches.retrieve(begun.id), (one) => one.status === "completed");
  assert.deepEqual(batch.request_counts, { total: 2, completed: 1, failed: 1 });
  const right = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
  const wrong = JSON.parse(await (await client.files.content(batch.error_file_id)).text());
  assert.match(right.response.body.choices[0].message.content, /Paris/);
  assert.equal(batch.usage.total_tokens, right.response.body.usage.total_tokens);
  assert.equal(wrong.response.status_code, 400);
  const listed = [];
  for await (const one of client.batches.list()) listed.push(one.id);
  assert.ok(listed.includes(batch.id));
  await client.files.delete(file.id);
});
done();
