// What the browser keeps under a name: `lasting` for good, `ofTab` until the tab is closed. Where it keeps none, as long as the page.

function storage(find) {
  try {
    return find();
  } catch { // the user's settings forbid it
    const held = new Map();
    return { getItem: (name) => held.get(name) ?? null, setItem: (name, value) => held.set(name, value), removeItem: (name) => held.delete(name) };
  }
}

export const lasting = storage(() => localStorage);
export const ofTab = storage(() => sessionStorage);
