// The keyboard: which letter a key is, and the dialog that lists the keys.

import { dialog, make } from "./dom.js";

const KEYS = [["Enter", "send"], ["Shift + Enter", "a new line"], ["Escape", "stop the answer; close a panel"], ["/", "go to the message"], ["Alt + N", "new chat"], ["Alt + K", "search conversations"], ["Alt + V", "text or tokens"], ["Alt + S", "settings"], ["Alt + C", "compare settings"], ["← → ↑ ↓ Home End", "in tokens and tabs: move"], ["Enter on a token", "explain it"], ["?", "this list"]];

/** Returns the letter of a key: what it types; its place on the keyboard where Alt types something else, as on macOS. */
export const letterOf = (event) => (/^[a-z]$/i.test(event.key) ? event.key : event.code.replace("Key", "")).toLowerCase();

export function showHelp() {
  dialog("Help and keys",
    make("p", {}, "Send a message, then show the answer as tokens: the paler a token, the surer the model was. Choose a token to see what each stage of sampling did, and take another one to branch there."),
    make("ul", { class: "legend" }, ...[["s7", "likely"], ["s3", "unlikely"], ["s0", "very unlikely"], ["forced", "forced by a constraint"], ["taken", "taken by you"], ["kept cached", "kept, from the prefix cache"]].map(([kind, text]) => make("li", {}, make("span", { class: `token ${kind}` }, text)))),
    make("dl", { class: "keys" }, ...KEYS.flatMap(([keys, what]) => [make("dt", {}, make("kbd", {}, keys)), make("dd", {}, what)])));
}
