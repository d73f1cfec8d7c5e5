
"use strict";
const POLL_MS = 1000, SPAN = 300, WIDTH = 600, HEIGHT = 100, ROW_PX = 22;
const byId = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en-US");
const counted = (value, one, more = `${one}s`) => `${count(value)} ${Math.round(value) === 1 ? one : more}`;
const rate = (value) => (value < 100 ? value.toFixed(1) : count(value));
const time = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : value < 90 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`);
const share = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
const PLOTS = [
  { name: "Output", unit: "tokens/s", format: rate, series: [["output_tokens_per_s", ""]] },
  { name: "Prompts", unit: "tokens/s", format: rate, series: [["prompt_tokens_per_s", ""]] },
  { name: "Requests", unit: "", format: count, series: [["num_running", "running"], ["num_waiting", "waiting"]] },
  { name: "KV cache held by requests", unit: "", format: share, most: 1, series: [["kv_share", ""]] },
  { name: "Time to first token", unit: "", format: time, series: [["ttft_mean_s", "mean"], ["ttft_p95_s", "95 %"]] },
  { name: "Time between tokens", unit: "", format: time, series: [["itl_mean_s", "mean"], ["itl_p95_s", "95 %"]] },
];
const FACTS = [
  ["Running", "sglang:num_running_reqs"], ["Waiting", "sglang:num_queue_reqs"], ["Waiting for a grammar", "sglang:num_grammar_queue_reqs"],
  ["Prompt tokens (finished requests)", "sglang:prompt_tokens_total"], ["Prompt tokens from cache", "sglang:cached_tokens_total"], ["Output tokens (finished requests)", "sglang:generation_tokens_total"],
  ["Stopped by a stop token or string", 'sglang:num_requests_total{finish_reason="stop"}'], ["Stopped by max tokens", 'sglang:num_requests_total{finish_reason="length"}'],
  ["Aborted", 'sglang:num_requests_total{finish_reason="abort"}'], ["Failed", 'sglang:num_requests_total{finish_reason="error"}'],
  ["Preempted", "sglang:num_retracted_requests_total"], ["Engines replaced", "sglang:engine_replacements_total"],
];
const known = new Map(); // name of a model -> its samples and what shows it
let isPaused = false, timer = 0, uptime = 0, looks = 0;

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name.includes("-") || name === "role" ? node.setAttribute(name, value) : (node[name] = value);
  node.append(...children);
  return node;
}

function drawn(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const line = (columns) => make("tr", {}, ...columns.map((text) => make("td", { textContent: text })));

function table(name, heads, rows) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { textContent: text, scope: "col" }))));
  return make("div", { className: "scroll", role: "region", tabIndex: 0, "aria-label": name }, make("table", {}, head, make("tbody", {}, ...rows)));
}

function makePlot(plot) {
  const numbers = plot.series.map(() => make("b", {}));
  const labels = plot.series.map(([, label], index) => make("span", { className: "number" }, ...(label ? [make("i", { className: index ? "second" : "" })] : []), numbers[index], ` ${[plot.unit, label].filter(Boolean).join(" ")}`));
  const most = make("span", {}), svg = drawn("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const node = make("figure", {}, make("figcaption", {}, make("h3", { textContent: plot.name }), ...labels), svg, make("div", { className: "axis" }, make("span", { textContent: "10 min ago" }), most, make("span", { textContent: "now" })));
  return { node, update: (samples) => updatePlot(plot, samples, numbers, most, svg) };
}

function updatePlot(plot, samples, numbers, most, svg) {
  const newest = samples.length ? samples[samples.length - 1].number : 0;
  const values = samples.flatMap((sample) => plot.series.map(([name]) => sample[name])).filter((value) => value !== null);
  const top = plot.most || Math.max(0, ...values) || 1;
  svg.replaceChildren();
  const told = plot.series.map(([name, label], index) => {
    const seen = samples.filter((sample) => sample[name] !== null);
    const last = seen.length ? plot.format(seen[seen.length - 1][name]) : "none yet";
    numbers[index].textContent = seen.length ? last : "–";
    let points = [];
    const flush = () => { if (points.length) svg.append(drawn("polyline", { points: (points.length > 1 ? points : [points[0], points[0]]).join(" "), ...(index ? { class: "second" } : {}) })); points = []; };
    for (const sample of samples) {
      if (sample[name] === null) { flush(); continue; }
      const x = WIDTH - ((newest - sample.number) / (SPAN - 1)) * WIDTH;
      points.push(`${x.toFixed(1)},${(HEIGHT - 2 - (sample[name] / top) * (HEIGHT - 6)).toFixed(1)}`);
    }
    flush();
    const range = seen.length ? `, from ${plot.format(Math.min(...seen.map((sample) => sample[name])))} to ${plot.format(Math.max(...seen.map((sample) => sample[name])))}` : "";
    return `${label ? label + " " : ""}${last}${range}`;
  });
  most.textContent = values.length ? `top: ${plot.format(top)}` : "nothing yet";
  svg.setAttribute("aria-label", `${plot.name}${plot.unit ? `, ${plot.unit}` : ""}, over the last ten minutes: ${told.join("; ")}`);
}

function pagesOf(pages, pageSize) {
  const all = pages.used + pages.cached + pages.free || 1, bar = make("div", { className: "bar", role: "img" });
  const words = { used: "held by requests", cached: "cached prefixes", free: "free" };
  const key = Object.entries(words).map(([name, text]) => make("span", {}, make("i", { className: name }), `${count(pages[name])} ${text} (${share(pages[name] / all)})`));
  bar.setAttribute("aria-label", `KV cache of ${counted(all, "page")} of ${counted(pageSize, "token")}`);
  for (const name of ["used", "cached"]) {
    const part = make("span", { className: name });
    part.style.width = `${(pages[name] / all) * 100}%`;
    bar.append(part);
  }
  return [make("h3", { textContent: `KV cache: ${counted(all, "page")} of ${counted(pageSize, "token")}` }), bar, make("p", { className: "key" }, ...key)];
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
  const title = make("h3", { textContent: "Prefix cache" });
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
  const list = make("details", { open: isOpen }, make("summary", { textContent: "As a table" }), make("div", {}, table("Branches of the prefix cache", ["tokens from start", "length", "requests that run with it", "prompts that go on behind it"], rows)));
  return [title, make("p", { textContent: `From left to right: tokens from the start of prompts. ${about}` }), box, key, list];
}

const words = (branch) => `${counted(branch.tokens, "token")}, ${counted(branch.holders, "running request")}, ${counted(branch.children, "continuation")}`;

function requestsOf(model, isAdmin) {
  if (!model.num_requests) return [make("p", { textContent: "None now." })];
  const heads = ["state", "age", "tokens/s", "output", "prompt", "first token after", ...(isAdmin ? ["client", "rid"] : [])];
  const rows = model.requests.map((one) => line([one.state, time(one.age_s), one.tokens_per_s === null ? "–" : rate(one.tokens_per_s), count(one.output_tokens), count(one.prompt_tokens), one.ttft_s === null ? "–" : time(one.ttft_s), ...(isAdmin ? [one.client || "(no name)", one.rid] : [])]));
  const left = model.num_requests - rows.length;
  return [table("Requests that have not ended", heads, rows), ...(left ? [make("p", { textContent: `${counted(left, "younger one is", "younger ones are")} not listed.` })] : [])];
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

function makeView(name) {
  const plots = PLOTS.map(makePlot), parts = {};
  for (const part of ["health", "facts", "requests", "cache", "errors", "figures"]) parts[part] = make(part === "facts" ? "dl" : "div", { className: part === "facts" ? "facts" : "" });
  const all = make("details", {}, make("summary", { textContent: "All figures of /metrics" }), make("div", {}, parts.figures));
  const node = make("section", { "aria-label": name }, make("h2", { textContent: name }), parts.health, make("div", { className: "plots" }, ...plots.map((plot) => plot.node)), parts.facts, make("h3", { textContent: "Requests" }), parts.requests, parts.cache, make("h3", { textContent: "Errors" }), parts.errors, all);
  byId("models").append(node);
  return { samples: [], plots, parts, all, node };
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
    replaced(view.parts.facts, FACTS.map(([text, name]) => make("div", {}, make("dt", { textContent: text }), make("dd", { textContent: count(model.figures[name] || 0) }))));
    replaced(view.parts.requests, requestsOf(model, answer.is_admin));
    const isOpen = [...view.parts.cache.querySelectorAll("details")].map((one) => one.open);
    replaced(view.parts.cache, model.engines.flatMap((engine, index) => [...(model.engines.length > 1 ? [make("h3", { textContent: `Replica ${index}` })] : []), ...pagesOf(engine.pages, model.page_size), ...(answer.is_admin ? treeOf(engine, Boolean(isOpen[index])) : [])]));
    replaced(view.parts.errors, errorsOf(model.figures));
    if (view.all.open) replaced(view.parts.figures, [table("All figures", ["name", "value"], Object.entries(model.figures).map(([name, value]) => line([name, String(value)])))]);
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
  if (!byId("use").contains(document.activeElement)) byId("use").replaceChildren(make("h2", { textContent: "Use by client" }), make("p", { textContent: answer.kept ? "Since the file of --usage-db began." : "Since the start; --usage-db keeps it longer." }), shown, link);
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
