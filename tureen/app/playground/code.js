// Code blocks: their colours, and a button that copies them. The colours need no knowledge of a language but how it
// writes comments: comments, strings, numbers, and words that are keywords in common languages.

import { button, copy, make } from "./dom.js";

const LONGEST = 20_000; // characters; a longer block has no colours
const COMMENTS = {
  hash: String.raw`#.*`,
  slash: String.raw`\/\/.*|\/\*[\s\S]*?(?:\*\/|$)`,
  dash: String.raw`--.*`,
  markup: String.raw`<!--[\s\S]*?(?:-->|$)`,
  json: String.raw`(?!)`,
};
const LANGUAGES = {
  hash: "python py bash sh shell zsh console ruby rb yaml yml toml ini r perl make makefile dockerfile elixir",
  slash: "javascript js jsx typescript ts tsx java c h cpp c++ cs csharp go rust rs swift kotlin php scala dart css scss",
  dash: "sql lua haskell hs",
  markup: "html xml svg",
  json: "json jsonc",
};
const KINDS = new Map(Object.entries(LANGUAGES).flatMap(([kind, names]) => names.split(" ").map((name) => [name, kind])));
const KEYWORDS = new Set(`abstract and as assert async await begin break case catch class const continue def default
  defer del do done echo elif else elsif end enum esac except export extends extern False false fi finally fn for from
  func function global go goto if impl implements import in include insert instanceof interface into is lambda let
  local loop match mod module mut namespace new nil None nonlocal not null nullptr of or override package pass private
  protected pub public raise range return select self set static struct super switch template then this throw trait
  True true try type typedef typeof union unless until update use using values var virtual void where while with
  yield`.split(/\s+/));
const LONG_STRINGS = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
const UNTIL_QUOTE = { '"': /(?:\\.|[^"\\\n])*/y, "'": /(?:\\.|[^'\\\n])*/y, "`": /(?:\\.|[^`\\])*/y };
const NUMBERS = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;

/**
 * Returns a function (quote, index) => the end of the string that the quote at `index` opens; 0 if it is not closed.
 * After a search that fails, all such quotes up to the place where it stopped are escaped, so they open no closed string
 * either. Skipping them keeps the work linear.
 */
function stringEnds(text) {
  const searched = {};
  return (quote, index) => {
    if (index < searched[quote]) return 0;
    const search = UNTIL_QUOTE[quote];
    search.lastIndex = index + 1;
    search.test(text);
    if (text[search.lastIndex] === quote) return search.lastIndex + 1;
    searched[quote] = search.lastIndex;
    return 0;
  };
}

/** Returns [[kind, text]] that make up `text`. A kind is "comment", "string", "number", "keyword", or "" for the rest. */
export function pieces(text, language) {
  const family = KINDS.get(language.toLowerCase());
  if (!family || text.length > LONGEST) return [["", text]];
  const words = family === "markup" ? String.raw`<\/?[\w-]+` : String.raw`[A-Za-z_]\w*`;
  const pattern = new RegExp(`(?<comment>${COMMENTS[family]})|(?<string>${LONG_STRINGS})|(?<quote>["'\`])|(?<number>${NUMBERS})|(?<word>${words})`, "g");
  const isKeyword = (word) => family === "markup" || KEYWORDS.has(family === "dash" ? word.toLowerCase() : word);
  const found = [];
  const add = (kind, piece) => {
    if (!piece) return;
    if (found.length && found.at(-1)[0] === kind) found.at(-1)[1] += piece;
    else found.push([kind, piece]);
  };
  const endOfString = stringEnds(text);
  let last = 0;
  for (let match; (match = pattern.exec(text)); last = pattern.lastIndex) {
    const { index, groups } = match;
    add("", text.slice(last, index));
    const end = groups.quote ? endOfString(groups.quote, index) : 0;
    if (end) pattern.lastIndex = end;
    const piece = text.slice(index, pattern.lastIndex);
    const kind = end ? "string" : ["comment", "string", "number"].find((kind) => groups[kind]);
    add(kind ?? (groups.word && isKeyword(piece) ? "keyword" : ""), piece);
  }
  add("", text.slice(last));
  return found;
}

/** Colours the code of a `pre`, and puts it below a line that names its language and copies it. */
export function dressCode(pre) {
  const code = pre.querySelector("code") ?? pre, text = code.textContent;
  const language = /(?:^| )language-(\S+)/.exec(code.className)?.[1] ?? "";
  code.replaceChildren(...pieces(text, language).map(([kind, piece]) => (kind ? make("span", { class: `code-${kind}` }, piece) : piece)));
  const head = make("div", { class: "code-head" }, make("span", {}, language), button("Copy", () => copy(text), { "aria-label": "Copy this code" }));
  const block = make("div", { class: "code" }, head);
  pre.replaceWith(block);
  block.append(pre);
}
