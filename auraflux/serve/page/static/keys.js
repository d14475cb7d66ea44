// Keyboard shortcuts of the page. With Ctrl, or ⌘ on a Mac; those of the message field are in composer.js.

import { byId } from "./view/dom.js";

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

// Start the shortcuts; `run` has a function for each action.
export function startKeys(run) {
  const plain = { k: run.search, ",": run.tune, "/": run.write };
  // browsers keep some of these for themselves without Shift
  const shifted = { o: run.create, m: run.chooseModel, arrowup: run.previous, arrowdown: run.next, backspace: run.remove };
  addEventListener("keydown", (event) => {
    if (!(isMac ? event.metaKey : event.ctrlKey) || event.altKey || document.querySelector("dialog[open]")) return;
    const name = event.key.toLowerCase();
    const action = plain[name] ?? (event.shiftKey ? shifted[name] : undefined);
    // in text these select and delete words
    if (!action || (name.length > 1 && event.target.value)) return;
    event.preventDefault();
    action();
  });
  if (isMac) for (const key of byId("keys").querySelectorAll("kbd")) if (key.textContent === "Ctrl") key.textContent = "⌘";
}
