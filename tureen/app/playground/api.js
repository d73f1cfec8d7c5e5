// Asks the server. A stream whose connection drops is taken up again where it stopped; where the server cannot do
// that, the request is sent again with its seed, which brings the same tokens.

import { ofTab } from "./webstorage.js";

const KEY = "tureen.key";
const FIRST_WAIT_MS = 250, LONGEST_WAIT_MS = 4000;

export const getKey = () => ofTab.getItem(KEY) || "";
export const setKey = (key) => (key ? ofTab.setItem(KEY, key) : ofTab.removeItem(KEY));

export class ApiError extends Error {
  constructor(status, body) {
    const error = body && body.error;
    super((error && (error.message || error)) || `the server answered ${status}`);
    this.status = status;
    this.field = (error && error.param) || "";
    this.code = (error && error.code) || "";
  }
}

/** No server answers. */
export class ServerDown extends Error {}

/** Fetches; throws ServerDown that says what to do, in place of the browser's "Failed to fetch". */
async function fetched(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerDown(`The server at ${location.host} does not answer. Check that it is running, then try again.`, { cause: error });
  }
}

async function open(path, { body, method, headers, signal }) {
  const key = getKey();
  const response = await fetched(path, {
    method: method || (body === undefined ? "GET" : "POST"),
    headers: { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...(key ? { Authorization: `Bearer ${key}` } : {}), ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  const failure = new ApiError(response.status, await response.json().catch(() => null));
  if (response.status === 401) dispatchEvent(new CustomEvent("key-wanted", { detail: failure }));
  throw failure;
}

/** Returns the JSON that a route answers. Throws ApiError; ServerDown. */
export async function ask(path, body, options = {}) {
  return (await open(path, { body, ...options })).json();
}

/** Yields the events of a stream: {id, data}. */
async function* events(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { id: null, data: "" };
      for (const line of block.split(/\r?\n/)) {
        if (line.startsWith("id:")) event.id = line.slice(3).trim();
        else if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
      }
      if (event.data) yield event;
    }
  }
}

const pause = (ms, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, ms);
  addEventListener("online", resolve, { once: true });
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

/** Whether an error says that the server could not be reached, or is about to stop or to start. */
const isPassing = (error) => !(error instanceof ApiError) || error.status === 503 || error.status === 502;

/**
 * Yields the chunks of a streamed answer, and {again: true} before its first chunk comes a second time.
 * `onState` is called with "lost" when the connection drops, "back" when it goes on. `isPatient`: waits for a server that
 * does not answer yet. Throws ApiError; ServerDown; AbortError for `signal`.
 */
export async function* stream(path, body, { signal, onState, isPatient = false }) {
  const rid = `playground-${randomName()}`;
  let attempt = 0, round = 0, lastId = null, hasBegun = false;
  // Where the server keeps streams for clients that come back, leaving does not end a request.
  signal.addEventListener("abort", () => { ask("abort_request", { rid: rid + (round || "") }).catch(() => {}); }, { once: true });
  let response = isPatient ? null : await open(path, { body: { ...body, rid }, signal });
  for (;;) {
    try {
      for await (const event of response ? events(response) : []) {
        if (event.id) lastId = event.id;
        if (attempt) onState("back");
        attempt = 0;
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(chunk.error.status || 500, chunk);
        hasBegun = true;
        yield chunk;
      }
    } catch (error) {
      if (signal.aborted || error instanceof ApiError) throw error;
    }
    response = null;
    onState("lost");
    while (response === null) {
      await pause(Math.min(FIRST_WAIT_MS * 2 ** attempt++, LONGEST_WAIT_MS), signal);
      try {
        if (lastId === null) throw new ApiError(404, null);
        response = await open(`generate/${rid}${round || ""}/events`, { headers: { "Last-Event-ID": lastId }, signal });
      } catch (error) {
        if (signal.aborted) throw error;
        if (isPassing(error)) continue;
        try {
          response = await open(path, { body: { ...body, rid: rid + (round + 1) }, signal });
          round += 1;
          lastId = null;
          if (hasBegun) yield { again: true };
        } catch (failure) {
          if (signal.aborted || !isPassing(failure)) throw failure;
        }
      }
    }
  }
}

/** Returns a random name. (crypto.randomUUID is missing where a page came over plain HTTP from another machine.) */
export function randomName() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
