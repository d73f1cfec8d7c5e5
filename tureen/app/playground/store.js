// Keeps conversations in this browser (IndexedDB). Where it keeps nothing, they last as long as the page.

const NAME = "tureen", TABLE = "conversations";
const unkept = new Map();
let opened = null;

function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

async function transact(mode, work, instead) {
  const base = await database();
  if (base === null) return instead();
  return new Promise((resolve, reject) => {
    const transaction = base.transaction(TABLE, mode);
    const request = work(transaction.objectStore(TABLE));
    if (mode === "readwrite") transaction.commit(); // now: one that waits for its page to say no more is lost with the page
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const all = async () => (await transact("readonly", (table) => table.getAll(), () => [...unkept.values()])).sort((a, b) => b.updated - a.updated);
export const save = (conversation) => transact("readwrite", (table) => table.put(conversation), () => unkept.set(conversation.id, conversation));
export const remove = (id) => transact("readwrite", (table) => table.delete(id), () => unkept.delete(id));
