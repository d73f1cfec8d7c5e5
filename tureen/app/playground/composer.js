// The message box: its text and attachments, which are the draft of the conversation until they are sent.

import { announce, button, byId, make } from "./dom.js";
import { chosenFiles } from "./exchange.js";

const MAX_PICTURE_BYTES = 8 << 20, MAX_TEXT_BYTES = 1 << 20;

/** Returns the text of a file; null for one that is not UTF-8 text. */
export async function textOfFile(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/**
 * Returns {show(conversation), take(), isEmpty(), attach(files), choose()}. `canSee()`: whether the model takes
 * pictures. `onChange()` is called when the draft has changed.
 */
export function composerOf({ canSee, onChange }) {
  const box = byId("message");
  let conversation = null;
  const draft = () => (conversation.draft ??= { text: "", pictures: [], files: [] });

  function fit() {
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight / 3)}px`;
  }

  function keep() {
    if (!conversation) return; // the page is still loading
    draft().text = box.value;
    fit();
    onChange();
  }

  function chip(content, name, list, index) {
    const remove = () => { list.splice(index, 1); showAttachments(); onChange(); box.focus(); };
    return make("span", { class: "preview" }, content, button("×", remove, { class: "icon", "aria-label": `Remove ${name}` }));
  }

  function showAttachments() {
    const { pictures, files } = draft();
    byId("previews").replaceChildren(
      ...pictures.map((url, index) => chip(make("img", { src: url, alt: `Picture ${index + 1} of the message` }), `picture ${index + 1}`, pictures, index)),
      ...files.map((file, index) => chip(make("span", { class: "file" }, file.name), file.name, files, index)));
  }

  async function attach(files) {
    const wanted = draft(), isCompletion = conversation.mode === "completion";
    for (const file of files) {
      const isPicture = file.type.startsWith("image/") && file.type !== "image/svg+xml";
      const most = isPicture ? MAX_PICTURE_BYTES : MAX_TEXT_BYTES;
      if (isPicture && isCompletion) announce("A completion takes only text.");
      else if (isPicture && !canSee()) announce("This model does not accept pictures.");
      else if (file.size > most) announce(`${file.name} is larger than ${most >> 20} MB.`);
      else if (isPicture) wanted.pictures.push(await dataUrl(file));
      else {
        const text = await textOfFile(file);
        if (text === null) announce(`${file.name} is neither text nor a picture.`);
        else if (!isCompletion) wanted.files.push({ name: file.name, text });
        else if (wanted === conversation.draft) box.value = wanted.text += text;
        else wanted.text += text; // another conversation has been opened meanwhile
      }
    }
    if (wanted !== conversation.draft) return;
    showAttachments();
    keep();
  }

  box.addEventListener("input", keep);
  return {
    attach,
    async choose() { await attach(await chosenFiles(canSee() ? "image/*,text/*,.md,.json,.csv,.py,.js,.toml,.yaml" : "")); },
    isEmpty() { const { text, pictures, files } = draft(); return !text.trim() && !pictures.length && !files.length; },
    /** Shows the draft of a conversation. */
    show(next) {
      conversation = next;
      box.value = draft().text;
      fit();
      showAttachments();
    },
    /** Empties the draft; returns the fields of a turn that says it. */
    take() {
      const { text, pictures, files } = draft();
      conversation.draft = null;
      this.show(conversation);
      return { text, ...(pictures.length ? { pictures: [...pictures] } : {}), ...(files.length ? { files: [...files] } : {}) };
    },
  };
}
