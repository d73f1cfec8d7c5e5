// Shows a model's Markdown. Its HTML is text, its pictures are links, and of what is left the sanitizer passes a short
// list of elements. A text that grows is not made anew: only blocks that changed are.

import "./vendor/markdown-it.min.js";
import "./vendor/purify.min.js";
import { dressCode } from "./code.js";
import { make, visible } from "./dom.js";

const LONGEST = 200_000; // characters; what is longer is shown as it came
const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "start", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["start"],
  RETURN_DOM_FRAGMENT: true,
};
const markdown = globalThis.markdownit({ html: false }).disable("image");

/** Returns a text's blocks, each with the lines that it is made of. */
function blocksOf(text) {
  const lines = text.split("\n"), environment = {}, starts = [];
  for (const token of markdown.parse(text, environment)) if (token.level === 0 && token.map && token.nesting >= 0) starts.push(token.map[0]);
  const blocks = starts.map((start, index) => lines.slice(start, starts[index + 1] ?? lines.length).join("\n").trimEnd());
  return { blocks, environment };
}

function nodeOf(source, environment) {
  const fragment = globalThis.DOMPurify.sanitize(markdown.render(source, { references: environment.references }), ALLOWED);
  const node = make("div", { class: "block" }, fragment);
  for (const link of node.querySelectorAll("a")) {
    // the server may let whoever is at this machine do more than read: a link to it would do it in the user's name
    if (link.protocol === ":" || link.origin === location.origin) link.replaceWith(...link.childNodes);
    else Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  }
  for (const pre of node.querySelectorAll("pre")) {
    pre.tabIndex = 0;
    dressCode(pre);
  }
  for (const table of node.querySelectorAll("table")) {
    const scroller = make("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  // headings of an answer stand below the page's own
  for (const heading of node.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    heading.replaceWith(make("p", { role: "heading", "aria-level": 2 + Number(heading.tagName[1]), class: `h${heading.tagName[1]}` }, ...heading.childNodes));
  }
  return node;
}

/** Makes `container` show `text`. What it showed before, and still does, stays as it is. */
export function showMarkdown(container, text) {
  const safe = visible(text);
  if (safe.length > LONGEST) {
    container.sources = null;
    if (container.firstChild?.nodeType !== Node.TEXT_NODE || container.textContent !== safe) container.replaceChildren(safe);
    container.classList.add("plain");
    return;
  }
  const { blocks, environment } = blocksOf(safe);
  const known = container.sources ?? [];
  if (!container.sources) container.replaceChildren();
  container.classList.remove("plain");
  blocks.forEach((source, index) => {
    if (known[index] === source) return;
    const node = nodeOf(source, environment);
    if (container.children[index]) container.children[index].replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
  container.sources = blocks;
}
