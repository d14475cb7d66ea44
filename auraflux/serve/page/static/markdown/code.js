// A block of code with its language and a copy button. It can grow line by line.

import { copyFrom } from "../view/clipboard.js";
import { el, iconButton } from "../view/dom.js";
import { highlight } from "./highlight.js";
import { sanitize } from "./sanitize.js";

// Return the language that a code token names, "" if none.
export const languageOf = ({ lang }) => (lang ?? "").split(/[\s{]/, 1)[0].toLowerCase();

export const linesOf = (text) => (text ? text.split("\n") : []);

export class CodeBlock {
  constructor(language, lines) {
    this.language = language;
    this.shown = [];
    this.code = el("code");
    const button = iconButton("copy", "Copy code", () => copyFrom(button, this.text()));
    const head = el("figcaption", {}, el("span", {}, language || "text"), button);
    // a box that scrolls has to be reachable from the keyboard
    this.element = el("figure", { className: "code" }, head, el("pre", { tabIndex: 0 }, this.code));
    this.grow(lines);
  }

  // Show these lines. Lines that did not change keep their elements.
  grow(lines) {
    let same = 0;
    while (same < lines.length && this.shown[same]?.text === lines[same]) same += 1;
    while (this.shown.length > same) this.shown.pop().element.remove();
    for (const text of lines.slice(same)) {
      const { parts, closing } = highlight(text, this.language, this.shown.at(-1)?.closing);
      const element = el("span");
      for (const [kind, part] of parts) element.append(kind ? el("span", { className: `code-${kind}` }, part) : part);
      element.append("\n");
      this.code.append(sanitize(element));
      this.shown.push({ text, closing, element });
    }
  }

  text() {
    return this.shown.map((line) => line.text).join("\n");
  }
}
