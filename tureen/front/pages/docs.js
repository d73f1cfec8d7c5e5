
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

function fieldTable(schema, prefix, seen) {
  const rows = [], nested = [];
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const isRequired = (schema.required || []).includes(name);
    const standing = isRequired ? "required" : "default" in field ? JSON.stringify(field.default) : "";
    const shown = standing.length > 60 ? "{…}" : standing;
    rows.push(make("tr", {}, make("td", {}, make("code", { textContent: prefix + name })), make("td", { textContent: typeOf(field) }), make("td", {}, make("code", { textContent: shown })), make("td", { textContent: field.description || "" })));
    for (const inner of objectsIn(field, seen)) nested.push([`${prefix}${name}.`, inner]);
  }
  const head = make("tr", {}, ...["field", "type and bounds", "default", "meaning"].map((text) => make("th", { textContent: text })));
  const parts = [make("p", { textContent: schema.description || "" })];
  if (rows.length) parts.push(make("table", {}, head, ...rows));
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

async function send(method, path, body, shown) {
  const headers = body === null ? {} : { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = "Bearer " + byId("key").value;
  shown.textContent = "…";
  try {
    const response = await fetch(path, { method, headers, body });
    shown.className = response.ok ? "ok" : "failed";
    shown.textContent = `${response.status} ${response.headers.get("content-type") || ""}\n\n`;
    const reader = response.body.getReader(), decoder = new TextDecoder();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      shown.textContent += decoder.decode(value, { stream: true });
    }
  } catch (error) {
    shown.className = "failed";
    shown.textContent = String(error);
  }
}

function trial(method, path, operation) {
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const text = content ? make("textarea", { value: JSON.stringify(content.example, null, 2), ariaLabel: "body", spellcheck: false }) : null;
  const shown = make("pre", { hidden: true });
  const names = (operation.parameters || []).filter((one) => one.in === "path").map((one) => one.name);
  const fields = names.map((name) => make("input", { placeholder: name, ariaLabel: name }));
  const asked = () => [method, names.reduce((made, name, index) => made.replace(`{${name}}`, encodeURIComponent(fields[index].value)), path), text ? text.value : null];
  const go = make("button", { textContent: "Send", onclick: () => { shown.hidden = false; send(...asked(), shown); } });
  const copy = make("button", { textContent: "Copy as curl" });
  copy.onclick = async () => {
    const command = curlOf(...asked());
    try { await navigator.clipboard.writeText(command); copy.textContent = "Copied"; }
    catch { shown.hidden = false; shown.className = ""; shown.textContent = command; }
  };
  return [make("h3", { textContent: "Try it" }), ...(text ? [text] : []), make("div", { className: "row" }, ...fields, go, copy), shown];
}

function detailsOf(method, path, operation) {
  const parts = [], seen = new Set();
  const access = operation.security.length ? ("admin_key" in operation.security[0] ? "Needs the admin key." : "Needs an API key, where the server has any.") : "Open to everybody.";
  const answers = Object.keys(operation.responses["200"].content).join(" or, as a stream, ");
  parts.push(make("p", { textContent: `${access} Answers ${answers}.` }));
  for (const one of operation.parameters || []) parts.push(make("p", {}, make("code", { textContent: one.name }), ` (${one.in}) ${one.description || ""}`));
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) {
    const bodies = content.schema.anyOf || [content.schema];
    for (const body of bodies) {
      if (bodies.length > 1) parts.push(make("h3", { textContent: named(body).title }));
      parts.push(...fieldTable(named(body), "", seen));
    }
  }
  const errors = Object.entries(operation.responses).filter(([status]) => status >= 400);
  parts.push(make("h3", { textContent: "Errors" }), make("table", {}, ...errors.map(([status, one]) => make("tr", {}, make("td", { textContent: status }), make("td", { textContent: one.description })))));
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
  const groups = new Map(spec.tags.map((tag) => [tag.name, make("section", {}, make("h2", { textContent: tag.name }))]));
  const found = [];
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [name, operation] of Object.entries(methods)) {
      const method = name.toUpperCase(), inside = make("div", {});
      const summary = make("summary", {}, make("b", { textContent: method }), make("code", { textContent: path }), make("span", { textContent: operation.summary }));
      const node = make("details", { id: operation.operationId }, summary, inside);
      node.addEventListener("toggle", () => { if (node.open && !inside.hasChildNodes()) inside.append(...detailsOf(method, path, operation)); });
      groups.get(operation.tags[0]).append(node);
      found.push([node, wordsOf(path, operation)]);
    }
  }
  byId("about").textContent = spec.info.description;
  byId("routes").replaceChildren(...groups.values());
  byId("find").oninput = () => {
    const wanted = byId("find").value.toLowerCase();
    for (const [node, words] of found) node.hidden = !words.includes(wanted);
    for (const group of groups.values()) group.hidden = ![...group.querySelectorAll("details")].some((one) => !one.hidden);
  };
  const asked = location.hash && byId(location.hash.slice(1));
  if (asked) { asked.open = true; asked.scrollIntoView(); }
}

fetch("openapi.json").then((response) => response.json()).then((found) => { spec = found; show(); }).catch((error) => { byId("routes").textContent = "openapi.json could not be read: " + error; });
