// What every client asks, and how a script says what it saw.
import assert from "node:assert/strict";
import { z } from "zod";

export const url = process.argv[2];
export const CAPITAL = "What is the capital city of France? Answer in one sentence.";
export const WEATHER = "What is the weather in Paris?";
export const DESCRIBE = "Describe Ada, who is 36, as an object.";
export const LONG = "Tell a very long story about the sea.";
export const Person = z.object({ name: z.string(), age: z.number().int() });
export const City = z.object({ city: z.string() });

let passed = 0;

export async function check(name, work) {
  try {
    await work();
    passed += 1;
    console.log(`passed ${name}`);
  } catch (error) {
    console.log(`FAILED ${name}: ${error.stack} ${JSON.stringify(error.cause ?? error.data ?? null)}`);
    process.exitCode = 1;
  }
}

async function aborted() {
  const text = await (await fetch(`${url}/metrics`)).text();
  return Number(/^\w+:num_aborted_requests\w*(?:\{[^}]*\})? (\S+)$/m.exec(text)[1]);
}

export async function leaves(stream) {
  const before = await aborted();
  await stream();
  for (let left = 2000; (await aborted()) === before; left -= 1) {
    assert.ok(left, "the server aborted nothing");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

export function calls(all, field) {
  return [...new Set(all.map((call) => `${call.name ?? call.toolName}(${Object.keys(call[field])})`))];
}

export function done() {
  console.log(`${passed} passed`);
  process.exit();
}
