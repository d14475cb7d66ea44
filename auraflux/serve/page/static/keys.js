// Keyboard shortcuts of the page. With Ctrl, or ⌘ on a Mac; those of the message field are in composer.js.

import { byId } from "./view/dom.js";

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

// Start the shortcuts; `run` has a function for each action.
export function startKeys(run) {
  const actions = { k: run.search, o: run.create, ",": run.tune, m: run.chooseModel, "/": run.write };
  addEventListener("keydown", (event) => {
    const action = actions[event.key.toLowerCase()];
    if (!action || !(isMac ? event.metaKey : event.ctrlKey) || event.altKey || document.querySelector("dialog[open]")) return;
    // browsers keep some of these for themselves without Shift
    if (["o", "m"].includes(event.key.toLowerCase()) && !event.shiftKey) return;
    event.preventDefault();
    action();
  });
  if (isMac) for (const key of byId("keys").querySelectorAll("kbd")) if (key.textContent === "Ctrl") key.textContent = "⌘";
}
