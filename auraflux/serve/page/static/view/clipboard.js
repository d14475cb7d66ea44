// Copies text, also over plain HTTP, where browsers have no clipboard API.

import { el, relabel } from "./dom.js";
import { announce } from "./notice.js";

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text, className: "visually-hidden", readOnly: true });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("The browser did not allow copying.");
}

// Copy, and confirm it on the button.
export async function copyFrom(button, text) {
  const label = button.ariaLabel;
  try {
    await copy(text);
  } catch {
    announce("The browser did not allow copying.");
    return;
  }
  relabel(button, "check", "Copied");
  announce("Copied.");
  setTimeout(() => relabel(button, "copy", label), 1600);
}
