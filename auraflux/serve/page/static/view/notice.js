// Notifies the user: an announcement for screen readers, and a short note with at most one action.

import { byId, el } from "./dom.js";

let timer = 0;

// Announce `text` to screen readers.
export function announce(text) {
  byId("status").textContent = text;
}

// Close the note.
export function dismissNote() {
  byId("note").hidePopover();
}

// Show a note for a few seconds. `action` has a label and a function, for example to undo.
export function note(text, action = null) {
  const box = byId("note");
  const children = [el("span", {}, text)];
  if (action) {
    const run = () => {
      box.hidePopover();
      action.run();
    };
    children.push(el("button", { type: "button", className: "text-button", onclick: run }, action.label));
  }
  box.replaceChildren(...children);
  const dock = byId("dock").getBoundingClientRect();
  box.style.bottom = `${innerHeight - dock.top + 12}px`;
  box.style.left = `${dock.left + dock.width / 2}px`;
  // reopen it, so that it is above a dialog opened in the meantime
  box.hidePopover();
  box.showPopover();
  announce(text);
  clearTimeout(timer);
  // long enough to read it
  timer = setTimeout(() => box.hidePopover(), Math.max(action ? 8000 : 4000, 60 * text.length));
}
