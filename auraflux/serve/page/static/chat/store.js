// Stores conversations in the browser's IndexedDB, one record each.

const TABLE = "conversations";
let opened = null;

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function database() {
  opened ??= (() => {
    const request = indexedDB.open("auraflux", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    return promised(request);
  })();
  return opened;
}

async function within(mode, work) {
  const table = (await database()).transaction(TABLE, mode).objectStore(TABLE);
  return promised(work(table));
}

export const all = () => within("readonly", (table) => table.getAll());
export const put = (conversation) => within("readwrite", (table) => table.put(conversation));
export const remove = (id) => within("readwrite", (table) => table.delete(id));
