"use strict";
const POLL_MS = 1000, ROW_PX = 22;
const FACTS = [
  ["Running", "sglang:num_running_reqs", "Requests whose tokens are being computed now."],
  ["Waiting", "sglang:num_queue_reqs", "Requests that wait until running requests end or free memory."],
  ["Waiting for a grammar", "sglang:num_grammar_queue_reqs", "Requests whose schema, pattern or grammar is still being compiled."],
  ["Prompt tokens (finished requests)", "sglang:prompt_tokens_total", "Prompt tokens of all requests that have ended since the start."],
  ["Prompt tokens from cache", "sglang:cached_tokens_total", "Prompt tokens that the prefix cache had, so that they were not computed again."],
  ["Output tokens (finished requests)", "sglang:generation_tokens_total", "Generated tokens of all requests that have ended since the start."],
  ["Stopped by a stop token or string", 'sglang:num_requests_total{finish_reason="stop"}', "Requests that the model ended, or a stop string or stop token."],
  ["Stopped by max tokens", 'sglang:num_requests_total{finish_reason="length"}', "Requests that reached their token limit or the end of the context."],
  ["Aborted", 'sglang:num_requests_total{finish_reason="abort"}', "Requests that their client cancelled or left."],
  ["Failed", 'sglang:num_requests_total{finish_reason="error"}', "Requests that ended with an error of the server."],
  ["Preempted", "sglang:num_retracted_requests_total", "How often a running request was set aside because the KV cache was full. It is computed again later."],
  ["Engines replaced", "sglang:engine_replacements_total", "How often a new engine replaced one that crashed or did not respond."],
];
const HEADS = {
  "state": "Whether the request waits, runs, or waits for its grammar.",
  "age": "The time since the request arrived.",
  "tokens/s": "Generated tokens a second since the first one.",
  "output": "Tokens generated so far.",
  "prompt": "Tokens of the prompt.",
  "first token after": "The time from the arrival of the request to its first token.",
  "client": "The name that belongs to the API key of the request.",
  "rid": "The id of the request, which /abort_request takes.",
  "status": "The HTTP status of the answers.",
  "answers": "Answers with this status since the start.",
  "replica": "The number of the engine.",
  "engine": "Whether the engine answers.",
  "drained": "yes: the engine gets no new requests, and finishes those that it has.",
  "running": "Requests that the engine computes now.",
  "waiting": "Requests that wait in the engine.",
  "queued tokens": "Tokens that the engine still has to compute.",
  "replaced": "How often this engine was replaced by a new one.",
  "requests": "Requests that have ended.",
  "failed": "Requests that ended with an error.",
  "prompt tokens": "Tokens of the prompts.",
  "cached": "Prompt tokens that the prefix cache had.",
  "output tokens": "Generated tokens.",
  "tokens from start": "Where this piece lies in the prompts that have it.",
  "length": "Tokens of this piece.",
  "requests that run with it": "Running requests whose prompts contain this piece.",
  "continuations": "Different continuations of this piece in the cache.",
};
const CACHE = {
  whole: "The KV cache keeps what the model computed for each token. It is divided into pages.",
  used: "Pages that running requests need. They stay until the requests end.",
  cached: "Pages of earlier prompts, kept for requests that begin in the same way. They are evicted when running requests need pages.",
  free: "Unused pages.",
  tree: "Beginnings of prompts that the cache holds. A request with the same beginning does not compute it again.",
};
const helps = new Map(); // name of a series of /metrics -> its help
const known = new Map(); // name of a model -> its samples and what shows it
let isPaused = false, timer = 0, uptime = 0, looks = 0;

const line = (columns) => make("tr", {}, ...columns.map((text) => make("td", {}, text)));

function table(name, heads, rows) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, explained(text, HEADS[text])))));
  return make("div", { className: "scroll", role: "region", tabIndex: 0, "aria-label": name }, make("table", {}, head, make("tbody", {}, ...rows)));
}

function pagesOf(pages, pageSize) {
  const all = pages.used + pages.cached + pages.free || 1, bar = make("div", { className: "held", role: "img" });
  const words = { used: "held by requests", cached: "cached prefixes", free: "free" };
  const key = Object.entries(words).map(([name, text]) => make("span", {}, make("i", { className: name }), explained(`${count(pages[name])} ${text} (${share(pages[name] / all)})`, CACHE[name])));
  bar.setAttribute("aria-label", `KV cache of ${counted(all, "page")} of ${counted(pageSize, "token")}`);
  for (const name of ["used", "cached"]) {
    const part = make("span", { className: name });
    part.style.width = `${(pages[name] / all) * 100}%`;
    bar.append(part);
  }
  return [make("h3", {}, explained(`KV cache: ${counted(all, "page")} of ${counted(pageSize, "token")}`, CACHE.whole)), bar, make("p", { className: "key" }, ...key)];
}

function laidOut(branches) {
  const placed = branches.map(([parent, , tokens, holders, children]) => ({ parent, tokens, holders, children, start: 0, row: 0, rows: 0, below: [] }));
  placed.forEach((branch, index) => { if (branch.parent >= 0) placed[branch.parent].below.push(index); });
  let numRows = 0, width = 1;
  const place = (index, start) => { // deep trees are bounded: at most 64 branches
    const branch = placed[index];
    [branch.start, branch.row] = [start, numRows];
    width = Math.max(width, start + branch.tokens);
    if (branch.below.length) branch.below.forEach((child) => place(child, start + branch.tokens));
    else numRows += 1;
    branch.rows = numRows - branch.row;
  };
  placed.forEach((branch, index) => { if (branch.parent < 0) place(index, 0); });
  return { placed, numRows, width };
}

function treeOf(engine, isOpen) {
  const title = make("h3", {}, explained("Prefix cache", CACHE.tree));
  if (engine.branches === null) return [title, make("p", { textContent: "The engine did not answer: it is busy, or is being replaced." })];
  if (!engine.branches.length) return [title, make("p", { textContent: "Nothing is cached yet." })];
  const { placed, numRows, width } = laidOut(engine.branches);
  const shared = placed.filter((branch) => branch.holders > 1 || branch.children > 1).length;
  const more = engine.num_left_out ? ` ${counted(engine.num_left_out, "more is", "more are")} not drawn.` : "";
  const about = `${counted(placed.length, "branch", "branches")}, ${count(shared)} of them shared, up to ${counted(width, "token")} long.${more}`;
  const box = make("div", { className: "tree", role: "img", "aria-label": `The prefix cache: ${about}` });
  box.style.height = `${numRows * ROW_PX}px`;
  for (const branch of placed) {
    const text = `${count(branch.tokens)}${branch.holders ? ` ×${branch.holders}` : ""}`;
    const node = make("div", { className: `held${Math.min(2, branch.holders)}`, textContent: text, title: words(branch) });
    node.style.left = `${(branch.start / width) * 100}%`;
    node.style.width = `${(branch.tokens / width) * 100}%`;
    node.style.top = `${branch.row * ROW_PX}px`;
    node.style.height = `${branch.rows * ROW_PX - 2}px`;
    box.append(node);
  }
  const key = make("p", { className: "key" }, ...[["held2", "several requests run with it"], ["held1", "one does"], ["held0", "none does; it is kept"]].map(([name, text]) => make("span", {}, make("i", { className: name }), text)));
  const rows = placed.map((branch) => line([`${count(branch.start)} to ${count(branch.start + branch.tokens)}`, count(branch.tokens), count(branch.holders), count(branch.children)]));
  const list = make("details", { open: isOpen }, make("summary", { textContent: "As a table" }), make("div", {}, table("Branches of the prefix cache", ["tokens from start", "length", "requests that run with it", "continuations"], rows)));
  return [title, make("p", { textContent: `From left to right: tokens from the start of prompts. ${about}` }), box, key, list];
}

const words = (branch) => `${counted(branch.tokens, "token")}, ${counted(branch.holders, "running request")}, ${counted(branch.children, "continuation")}`;

function requestsOf(model, isAdmin) {
  if (!model.num_requests) return [make("p", { textContent: "None now." })];
  const heads = ["state", "age", "tokens/s", "output", "prompt", "first token after", ...(isAdmin ? ["client", "rid"] : [])];
  const rows = model.requests.map((one) => line([one.state, time(one.age_s), one.tokens_per_s === null ? "–" : rate(one.tokens_per_s), count(one.output_tokens), count(one.prompt_tokens), one.ttft_s === null ? "–" : time(one.ttft_s), ...(isAdmin ? [one.client || "(no name)", one.rid] : [])]));
  const left = model.num_requests - rows.length;
  return [table("Requests that have not ended", heads, rows), ...(left ? [make("p", { textContent: `${counted(left, "newer request is", "newer requests are")} not listed.` })] : [])];
}

function errorsOf(figures) {
  const found = Object.entries(figures).map(([name, value]) => [name.match(/^sglang:http_responses_total\{status="(\d+)"\}$/), value]).filter(([match]) => match && match[1] >= "400");
  if (!found.length) return [make("p", { textContent: "None." })];
  return [table("Errors by HTTP status", ["status", "answers"], found.map(([match, value]) => line([match[1], count(value)])))];
}

function replicasOf(replicas) {
  if (!replicas.length) return [];
  const rows = replicas.map((one) => line([one.replica, one.engine + (one.reason ? `: ${one.reason}` : ""), one.drained ? "yes" : "no", count(one.num_running), count(one.num_waiting), count(one.queued_tokens), count(one.num_replacements)]));
  return [make("h3", { textContent: "Replicas" }), table("Replicas", ["replica", "engine", "drained", "running", "waiting", "queued tokens", "replaced"], rows)];
}

/** Returns the help of a series; that of its histogram for `_sum` and `_count`. */
function helpOf(series) {
  const name = series.replace(/\{.*/, "");
  return helps.get(name) ?? helps.get(name.replace(/_(sum|count)$/, ""));
}

async function readHelps() {
  const text = await ask("metrics").then((answer) => answer.text(), () => ""); // without help texts, the names are shown alone
  for (const [, name, help] of text.matchAll(/^# HELP (\S+) (.*)/gm)) helps.set(name, help);
}

function showFigures(view) {
  if (!view.all.open) return;
  const rows = Object.entries(view.figures).map(([name, value]) => line([explained(name, helpOf(name)), value]));
  replaced(view.parts.figures, [table("All figures", ["name", "value"], rows)]);
}

function makeView(name) {
  const plots = PLOTS.map(makePlot), parts = {};
  for (const part of ["health", "facts", "requests", "cache", "errors", "figures"]) parts[part] = make(part === "facts" ? "dl" : "div", { className: part === "facts" ? "facts" : "" });
  const all = make("details", {}, make("summary", { textContent: "All figures of /metrics" }), make("div", {}, parts.figures));
  const node = make("section", { "aria-label": name }, make("h2", { textContent: name }), parts.health, make("div", { className: "plots" }, ...plots.map((plot) => plot.node)), parts.facts, make("h3", { textContent: "Requests" }), parts.requests, parts.cache, make("h3", { textContent: "Errors" }), parts.errors, all);
  byId("models").append(node);
  const view = { samples: [], figures: {}, plots, parts, all, node };
  all.ontoggle = () => readHelps().then(() => showFigures(view));
  return view;
}

function replaced(node, children) { // the one that has the focus stays
  if (node.contains(document.activeElement) && document.activeElement !== document.body) {
    const index = [...node.querySelectorAll("[tabindex], summary")].indexOf(document.activeElement);
    const left = [...node.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    node.replaceChildren(...children);
    node.querySelectorAll(".scroll").forEach((one, number) => { one.scrollLeft = left[number] || 0; });
    const again = node.querySelectorAll("[tabindex], summary")[index];
    if (again) again.focus({ preventScroll: true });
  } else node.replaceChildren(...children);
}

function show(answer) {
  if (answer.uptime_s < uptime) { known.clear(); byId("models").replaceChildren(); }
  uptime = answer.uptime_s;
  for (const model of answer.models) {
    if (!known.has(model.name)) known.set(model.name, makeView(model.name));
    const view = known.get(model.name), newest = view.samples.length ? view.samples[view.samples.length - 1].number : 0;
    const fresh = model.samples.map((row) => Object.fromEntries(answer.sample_fields.map((name, index) => [name, row[index]]))).filter((sample) => sample.number > newest);
    view.samples = [...view.samples, ...fresh].slice(-SPAN);
    view.plots.forEach((plot) => plot.update(view.samples));
    const health = `Engine: ${model.engine.state}${model.engine.reason ? ` (${model.engine.reason})` : ""}.`;
    replaced(view.parts.health, [make("p", { textContent: health, className: model.engine.state === "healthy" ? "ok" : "failed" }), ...replicasOf(model.replicas)]);
    replaced(view.parts.facts, FACTS.map(([text, name, about]) => make("div", {}, make("dt", {}, explained(text, about)), make("dd", { textContent: count(model.figures[name] || 0) }))));
    replaced(view.parts.requests, requestsOf(model, answer.is_admin));
    const isOpen = [...view.parts.cache.querySelectorAll("details")].map((one) => one.open);
    replaced(view.parts.cache, model.engines.flatMap((engine, index) => [...(model.engines.length > 1 ? [make("h3", { textContent: `Replica ${index}` })] : []), ...pagesOf(engine.pages, model.page_size), ...(answer.is_admin ? treeOf(engine, Boolean(isOpen[index])) : [])]));
    replaced(view.parts.errors, errorsOf(model.figures));
    view.figures = model.figures;
    showFigures(view);
  }
  const helpers = answer.helpers_down.length ? `Helper processes that are being replaced: ${answer.helpers_down.join(", ")}.` : "Helper processes are running.";
  const more = answer.is_admin ? "" : " The admin key shows all clients' requests and the prefix cache.";
  tell(`tureen ${answer.version}, up ${time(answer.uptime_s)}. ${helpers}${more}`);
}

function tell(text) {
  const news = byId("news"); // a reader of the screen hears of changes of state, not of each second
  news.setAttribute("aria-live", news.dataset.kind === text.slice(0, 12) ? "off" : "polite");
  news.dataset.kind = text.slice(0, 12);
  news.textContent = text;
}

async function ask(path) {
  const key = byId("key").value;
  const response = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" }).catch(() => { throw new Error("The server does not answer"); });
  if (response.ok) return response;
  const error = await response.json().then((body) => body.error.message, () => response.statusText);
  throw Object.assign(new Error(error), { status: response.status });
}

async function showUse() {
  const answer = await (await ask("usage")).json(), rows = answer.clients.map((one) => line([one.client || "(no name)", ...["requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens"].map((name) => count(one[name]))]));
  const link = make("button", { type: "button", textContent: "Save as CSV", onclick: saveUse });
  if (!byId("use")) byId("models").append(make("section", { id: "use", "aria-label": "Clients" }));
  const shown = rows.length ? table("Use by client", ["client", "requests", "failed", "prompt tokens", "cached", "output tokens"], rows) : make("p", { textContent: "None yet." });
  if (!byId("use").contains(document.activeElement)) byId("use").replaceChildren(make("h2", { textContent: "Use by client" }), make("p", { textContent: answer.kept ? "Since the file of --usage-db was created." : "Since the start; --usage-db keeps it longer." }), shown, link);
}

async function saveUse() {
  try {
    const address = URL.createObjectURL(await (await ask("usage?format=csv")).blob());
    make("a", { href: address, download: "usage.csv" }).click();
    URL.revokeObjectURL(address);
  }
  catch (error) { byId("use").append(make("p", { role: "alert", textContent: `The use was not saved: ${error.message}` })); }
}

async function look() {
  clearTimeout(timer);
  if (isPaused || document.hidden) return;
  const after = known.size ? Math.min(...[...known.values()].map((view) => (view.samples.length ? view.samples[view.samples.length - 1].number : 0))) : 0;
  try {
    const answer = await (await ask(`status/live?after=${after}`)).json();
    show(answer);
    if (answer.is_admin && looks++ % 5 === 0) await showUse();
  }
  catch (error) { tell(error.status === 401 || error.status === 403 ? `${error.message} Enter it above.` : `${error.message}; trying again.`); }
  clearTimeout(timer);
  timer = setTimeout(look, POLL_MS);
}

byId("pause").onclick = () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  look();
};
try {
  byId("key").value = sessionStorage.getItem("tureen.key") || "";
  byId("key").oninput = () => { sessionStorage.setItem("tureen.key", byId("key").value); };
} catch { /* this browser keeps nothing: the key is typed again */ }
byId("key").onchange = look;
document.addEventListener("visibilitychange", look);
look();
