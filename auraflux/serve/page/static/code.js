// A block of code with its language and a copy button, which can grow while it is being written.

import { copyFrom } from "./clipboard.js";
import { el, iconButton } from "./dom.js";
import { tint } from "./tint.js";

export class CodeBlock {
  constructor(language, lines) {
    this.language = language;
    this.shown = [];
    this.code = el("code");
    const button = iconButton("copy", "Copy code", () => copyFrom(button, this.text()));
    const head = el("figcaption", {}, el("span", {}, language || "text"), button);
    // a region that scrolls has to be reachable from the keyboard
    this.element = el("figure", { className: "code" }, head, el("pre", { tabIndex: 0 }, this.code));
    this.grow(lines);
  }

  // Show these lines, keeping the elements of those that stay.
  grow(lines) {
    let same = 0;
    while (same < lines.length && this.shown[same]?.text === lines[same]) same += 1;
    while (this.shown.length > same) this.shown.pop().element.remove();
    for (const text of lines.slice(same)) {
      const { parts, closing } = tint(text, this.language, this.shown.at(-1)?.closing);
      const element = el("span");
      for (const [kind, part] of parts) element.append(kind ? el("span", { className: `tint-${kind}` }, part) : part);
      element.append("\n");
      this.code.append(element);
      this.shown.push({ text, closing, element });
    }
  }

  text() {
    return this.shown.map((line) => line.text).join("\n");
  }
}
