// Tells the reader what happened: aloud for screen readers, and as a short note with at most one thing to do about it.

import { byId, el } from "./dom.js";

let timer = 0;

// Say something to those who listen to the page.
export function announce(text) {
  byId("status").textContent = text;
}

// Show a note for a while; `action` is a label and what it does, such as undoing.
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
  // shown anew each time, which puts it above a dialog that was opened since
  box.hidePopover();
  box.showPopover();
  announce(text);
  clearTimeout(timer);
  timer = setTimeout(() => box.hidePopover(), action ? 8000 : 4000);
}
