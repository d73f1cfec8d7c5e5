
"use strict";
const BOUNDS = { minimum: "≥ ", exclusiveMinimum: "> ", maximum: "≤ ", exclusiveMaximum: "< ", minLength: "length ≥ ", maxLength: "length ≤ ", minItems: "entries ≥ ", maxItems: "entries ≤ ", maxProperties: "entries ≤ " };
const LARGEST = 2 ** 62; // bounds beyond are those of the number's format
const byId = (id) => document.getElementById(id);
let spec;

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node[name] = value;
  node.append(...children);
  return node;
}

const prose = (text = "") => text.split("`").map((part, index) => (index % 2 ? make("code", { textContent: part }) : part)); // `code` as Markdown has it

const named = (schema) => (schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema);

function typeOf(schema) {
  if (schema.$ref) return named(schema).type === "object" ? "object" : typeOf(named(schema));
  if (schema.anyOf) return [...new Set(schema.anyOf.filter((one) => one.type !== "null").map(typeOf))].join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const bounds = Object.keys(BOUNDS).filter((name) => name in schema && Math.abs(schema[name]) < LARGEST).map((name) => BOUNDS[name] + schema[name]);
  const item = schema.type === "array" && schema.items ? ` of (${typeOf(schema.items)})` : "";
  return [(schema.type || "value") + item, ...bounds].join(", ");
}

function objectsIn(schema, seen) {
  if (schema.$ref && !seen.has(schema.$ref)) {
    seen.add(schema.$ref);
    return named(schema).properties ? [named(schema)] : objectsIn(named(schema), seen);
  }
  const inside = [...(schema.anyOf || []), ...(schema.items && schema.items !== true ? [schema.items] : [])];
  return inside.flatMap((one) => objectsIn(one, seen));
}

function wide(table) { // scrolls by itself, by keyboard too
  const node = make("div", { className: "wide", tabIndex: 0, ariaLabel: "fields" }, table);
  node.setAttribute("role", "region");
  return node;
}

function fieldTable(schema, prefix, seen) {
  const rows = [], nested = [];
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const isRequired = (schema.required || []).includes(name);
    const standing = isRequired ? "required" : "default" in field ? JSON.stringify(field.default) : "";
    const shown = standing.length > 60 ? "{…}" : standing;
    rows.push(make("tr", {}, make("td", {}, make("code", { textContent: prefix + name })), make("td", { textContent: typeOf(field) }), make("td", {}, make("code", { textContent: shown })), make("td", {}, ...prose(field.description))));
    for (const inner of objectsIn(field, seen)) nested.push([`${prefix}${name}.`, inner]);
  }
  const head = make("tr", {}, ...["field", "type and bounds", "default", "meaning"].map((text) => make("th", { textContent: text })));
  const parts = [make("p", {}, ...prose(schema.description))];
  if (rows.length) parts.push(wide(make("table", {}, head, ...rows)));
  for (const [path, inner] of nested) parts.push(make("h3", { textContent: path.slice(0, -1) }), ...fieldTable(inner, path, seen));
  return parts;
}

function curlOf(method, path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = [`curl ${method === "GET" ? "" : `-X ${method} `}${quoted(location.origin + path)}`];
  if (byId("key").value) parts.push(`-H ${quoted("Authorization: Bearer " + byId("key").value)}`);
  if (body !== null) parts.push(`-H 'Content-Type: application/json' -d ${quoted(body)}`);
  return parts.join(" ");
}

function textOf(event) { // what an event of any API's stream adds to the text
  const choice = (event.choices || [])[0] || {};
  const added = choice.delta ? choice.delta.content : choice.text;
  if (typeof added === "string") return added;
  if (event.message && typeof event.message.content === "string") return event.message.content;
  if (event.type === "response.output_text.delta") return event.delta;
  if (event.type === "content_block_delta") return event.delta.text || "";
  if (event.token && typeof event.token.text === "string") return event.token.text;
  return typeof event.response === "string" ? event.response : "";
}

function assembled(raw) {
  let text = "";
  for (const line of raw.split("\n")) {
    try { text += textOf(JSON.parse(line.replace(/^data:\s*/, ""))); } catch { /* no JSON: a comment, or [DONE] */ }
  }
  return text;
}

async function send(method, path, body, shown, said) {
  said.hidden = true;
  const headers = body === null ? {} : { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = "Bearer " + byId("key").value;
  shown.textContent = "…";
  try {
    const response = await fetch(path, { method, headers, body });
    shown.className = response.ok ? "ok" : "failed";
    shown.textContent = `${response.status} ${response.headers.get("content-type") || ""}\n\n`;
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let raw = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const piece = decoder.decode(value, { stream: true });
      raw += piece;
      shown.append(piece);
      const text = raw.length < 1e6 ? assembled(raw) : "";
      if (text) { said.hidden = false; said.lastElementChild.textContent = text; }
    }
  } catch (error) {
    shown.className = "failed";
    shown.textContent = error instanceof TypeError ? `The server at ${location.host} does not answer. Check that it is running, then send again.` : String(error);
  }
}

function trial(method, path, operation) {
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const text = content ? make("textarea", { value: JSON.stringify(content.example, null, 2), ariaLabel: "body", spellcheck: false }) : null;
  const shown = make("pre", { hidden: true, tabIndex: 0, ariaLabel: "answer" });
  const said = make("div", { hidden: true }, make("h3", { textContent: "Text" }), make("pre", { tabIndex: 0, ariaLabel: "text of the answer" }));
  const names = (operation.parameters || []).filter((one) => one.in === "path").map((one) => one.name);
  const fields = names.map((name) => make("input", { placeholder: name, ariaLabel: name }));
  const asked = () => [method, names.reduce((made, name, index) => made.replace(`{${name}}`, encodeURIComponent(fields[index].value)), path), text ? text.value : null];
  const go = make("button", { textContent: "Send", onclick: () => { shown.hidden = false; send(...asked(), shown, said); } });
  const copy = make("button", { textContent: "Copy as curl" });
  copy.onclick = async () => {
    const command = curlOf(...asked());
    try { await navigator.clipboard.writeText(command); copy.textContent = "Copied"; }
    catch { shown.hidden = false; shown.className = ""; shown.textContent = command; }
  };
  return [make("h3", { textContent: "Try it" }), ...(text ? [text] : []), make("div", { className: "row" }, ...fields, go, copy), said, shown];
}

function detailsOf(method, path, operation) {
  const parts = [], seen = new Set();
  const access = operation.security.length ? ("admin_key" in operation.security[0] ? "Needs the admin key." : "Needs an API key, where the server has any.") : "Open to everybody.";
  const answers = Object.keys(operation.responses["200"].content).join(" or, as a stream, ");
  parts.push(make("p", { textContent: `${access} Answers ${answers}.` }));
  for (const one of operation.parameters || []) parts.push(make("p", {}, make("code", { textContent: one.name }), ` (${one.in}) `, ...prose(one.description)));
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) {
    const bodies = content.schema.anyOf || [content.schema];
    for (const body of bodies) {
      if (bodies.length > 1) parts.push(make("h3", { textContent: named(body).title }));
      parts.push(...fieldTable(named(body), "", seen));
    }
  }
  const errors = Object.entries(operation.responses).filter(([status]) => status >= 400);
  parts.push(make("h3", { textContent: "Errors" }), make("table", {}, ...errors.map(([status, one]) => make("tr", {}, make("td", { textContent: status }), make("td", {}, ...prose(one.description))))));
  return [...trial(method, path, operation), ...parts];
}

function wordsOf(path, operation) {
  const names = [path, operation.summary], seen = new Set();
  const collect = (schema) => {
    names.push(...Object.keys(schema.properties || {}));
    for (const field of Object.values(schema.properties || {})) objectsIn(field, seen).forEach(collect);
  };
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) objectsIn(content.schema, seen).forEach(collect);
  return names.join(" ").toLowerCase();
}

function show() {
  const groups = new Map(spec.tags.map((tag) => [tag.name, make("details", { className: "group" }, make("summary", {}, make("h2", { textContent: tag.name }), make("span", {})), make("div", {}))]));
  const found = [];
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [name, operation] of Object.entries(methods)) {
      const method = name.toUpperCase(), inside = make("div", {});
      const summary = make("summary", {}, make("b", { textContent: method }), make("code", { textContent: path }), make("span", { textContent: operation.summary }));
      const node = make("details", { id: operation.operationId }, summary, inside);
      node.addEventListener("toggle", () => { if (node.open && !inside.hasChildNodes()) inside.append(...detailsOf(method, path, operation)); });
      groups.get(operation.tags[0]).lastElementChild.append(node);
      found.push([node, wordsOf(path, operation)]);
    }
  }
  byId("about").replaceChildren(...prose(spec.info.description));
  byId("routes").replaceChildren(...groups.values());
  byId("find").oninput = () => {
    const wanted = byId("find").value.trim().toLowerCase();
    let count = 0;
    for (const [node, words] of found) { node.hidden = !words.includes(wanted); count += node.hidden ? 0 : 1; }
    for (const group of groups.values()) {
      group.hidden = ![...group.querySelectorAll("details")].some((one) => !one.hidden);
      group.open = Boolean(wanted) && !group.hidden;
    }
    byId("found").textContent = !wanted ? "" : count ? `${count} found` : `No route and no field has “${byId("find").value}” in its name.`;
  };
  for (const group of groups.values()) {
    const count = group.querySelectorAll("details").length;
    group.querySelector("span").textContent = `${count} route${count === 1 ? "" : "s"}`;
  }
  const asked = location.hash && byId(location.hash.slice(1));
  if (asked) { asked.closest(".group").open = true; asked.open = true; asked.scrollIntoView(); }
}

fetch("openapi.json").then((response) => response.json()).then((found) => { spec = found; show(); }).catch((error) => { byId("routes").textContent = "openapi.json could not be read: " + error; });
