// Builds the DOM for markdown, and keeps it up while the text grows: only the last two blocks are ever built again, since
// text that comes later can still join them but cannot reach further back.

import { CodeBlock } from "./code.js";
import { el } from "./dom.js";
import { inline } from "./inline.js";
import { blocks } from "./markdown.js";

const OPEN_BLOCKS = 2;

export class Rendering {
  constructor(root) {
    this.root = root;
    this.settled = 0;
    this.open = [];
  }

  // Show `text`, which starts with the text shown before.
  update(text) {
    const lines = text.slice(this.settled).split("\n");
    const found = blocks(lines);
    found.forEach((block, at) => this.place(block, at, lines.slice(block.from, block.to).join("\n")));
    while (this.open.length > found.length) this.open.pop().element.remove();
    const done = found.length - OPEN_BLOCKS;
    if (done > 0) {
      this.open.splice(0, done);
      this.settled += lines.slice(0, found[done].from).reduce((sum, line) => sum + line.length + 1, 0);
    }
  }

  place(block, at, source) {
    const old = this.open[at];
    if (old?.source === source) return;
    if (old?.code && block.kind === "fence" && old.code.language === block.language) {
      old.code.grow(block.lines);
      old.source = source;
      return;
    }
    const code = block.kind === "fence" ? new CodeBlock(block.language, block.lines) : null;
    const element = code?.element ?? build(block);
    if (old) old.element.replaceWith(element);
    else this.root.append(element);
    this.open[at] = { source, element, code };
  }
}

const BUILDERS = {
  fence: ({ language, lines }) => new CodeBlock(language, lines).element,
  // the page has headings of its own above those of an answer
  heading: ({ level, text }) => filled(el(`h${Math.min(level + 2, 6)}`, { className: `level-${level}` }), inline(text)),
  rule: () => el("hr"),
  quote: ({ blocks }) => filled(el("blockquote"), blocks.map(build)),
  list: buildList,
  table: buildTable,
  math: ({ text }) => el("div", { className: "math-block", tabIndex: 0 }, text),
  paragraph: ({ text }) => filled(el("p"), inline(text)),
};

export function build(block) {
  return BUILDERS[block.kind](block);
}

function filled(element, nodes) {
  for (const node of nodes) element.append(node);
  return element;
}

function buildList({ ordered, start, loose, items }) {
  const list = el(ordered ? "ol" : "ul", { start: ordered ? start : null });
  for (const item of items) list.append(buildItem(item, loose));
  return list;
}

function buildItem({ done, blocks: inside }, loose) {
  const item = el("li");
  if (done !== null) {
    item.className = "task";
    item.append(el("input", { type: "checkbox", checked: done, disabled: true, ariaLabel: done ? "done" : "not done" }));
  }
  for (const block of inside) {
    if (block.kind === "paragraph" && !loose) filled(item, inline(block.text));
    else item.append(build(block));
  }
  return item;
}

function buildTable({ head, sides, rows }) {
  const row = (tag, cells) => {
    const made = cells.map((text, column) => filled(el(tag, { className: `side-${sides[column]}` }), inline(text)));
    return filled(el("tr"), made);
  };
  const body = filled(el("tbody"), rows.map((cells) => row("td", cells)));
  const table = el("table", {}, el("thead", {}, row("th", head)), body);
  return el("div", { className: "table", tabIndex: 0 }, table);
}
