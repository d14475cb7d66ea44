// Exports conversations to a file and imports them.

import { byId, el } from "../view/dom.js";
import { note } from "../view/notice.js";
import { pack, unpack } from "./transfer.js";

export function startExchange(library, changed) {
  const chooser = byId("import-file");
  byId("export").addEventListener("click", () => save(library.conversations));
  byId("import").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    const [file] = chooser.files;
    if (file) await take(file, library);
    chooser.value = "";
    changed();
  });
}

function save(conversations) {
  const day = new Date().toISOString().slice(0, 10);
  const url = URL.createObjectURL(new Blob([pack(conversations)], { type: "application/json" }));
  el("a", { href: url, download: `auraflux-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function take(file, library) {
  try {
    const found = unpack(await file.text()).filter((conversation) => conversation.messages.length);
    for (const conversation of found) {
      library.add(conversation);
      await library.save(conversation);
    }
    note(found.length === 1 ? "1 conversation imported." : `${found.length} conversations imported.`);
  } catch (error) {
    note(error.message);
  }
}
