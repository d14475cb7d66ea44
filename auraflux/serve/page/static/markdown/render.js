// Renders markdown that grows. Only the last blocks are lexed and built again: later text can still change them, but not
// the blocks before them. The cost of an update depends on the open blocks, not on the length of the answer.

import { build } from "./build.js";
import { CodeBlock, languageOf, linesOf } from "./code.js";
import { lex } from "./lexer.js";

const OPEN_BLOCKS = 2;

export class Rendering {
  constructor(root) {
    this.root = root;
    // characters of the text that belong to final blocks, each line end counted as one
    this.final = 0;
    this.open = [];
  }

  // Show `text`, which starts with the text shown before.
  update(text) {
    const plain = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    const blocks = [];
    let at = 0;
    for (const token of lex(plain.slice(this.final))) {
      if (token.type !== "space") blocks.push({ token, at });
      at += token.raw.length;
    }
    blocks.forEach(({ token }, index) => this.place(token, index));
    while (this.open.length > blocks.length) this.open.pop().element.remove();
    const done = blocks.length - OPEN_BLOCKS;
    if (done > 0) {
      this.open.splice(0, done);
      this.final += blocks[done].at;
    }
  }

  place(token, index) {
    const old = this.open[index];
    if (old?.raw === token.raw) return;
    if (old?.code && token.type === "code" && old.code.language === languageOf(token)) {
      old.code.grow(linesOf(token.text));
      old.raw = token.raw;
      return;
    }
    const code = token.type === "code" ? new CodeBlock(languageOf(token), linesOf(token.text)) : null;
    const element = code?.element ?? build(token);
    if (old) old.element.replaceWith(element);
    else this.root.append(element);
    this.open[index] = { raw: token.raw, element, code };
  }
}
