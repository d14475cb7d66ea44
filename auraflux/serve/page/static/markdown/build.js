// Builds sanitized DOM elements from markdown tokens. Text enters the page as text nodes only.

import { el } from "../view/dom.js";
import { CodeBlock, languageOf, linesOf } from "./code.js";
import { showMath } from "./math.js";
import { sanitize } from "./sanitize.js";

const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w+));/g;
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–", times: "×",
  minus: "−", middot: "·", larr: "←", rarr: "→", le: "≤", ge: "≥", ne: "≠", copy: "©", deg: "°",
};

// Return the element of a block token.
export function build(token) {
  const element = sanitize(el("div", {}, ...nodesOf(token)));
  decorate(element);
  return element.firstChild ?? el("p");
}

function nodesOf(token) {
  const made = Object.hasOwn(BUILDERS, token.type) ? BUILDERS[token.type](token) : token.raw;
  return Array.isArray(made) ? made : [made];
}

function fill(element, tokens) {
  for (const token of tokens) for (const node of nodesOf(token)) element.append(node);
  return element;
}

const BUILDERS = {
  paragraph: ({ tokens }) => fill(el("p"), tokens),
  // the page has headings of its own above those of an answer, which begin with # or ##
  heading: ({ depth, tokens }) => fill(el(`h${Math.min(Math.max(depth + 1, 3), 6)}`, { className: `level-${depth}` }), tokens),
  hr: () => el("hr"),
  blockquote: ({ tokens }) => fill(el("blockquote"), tokens),
  list: buildList,
  table: buildTable,
  // `decorate` replaces it with a code block, and TeX with a formula
  code: (token) => el("pre", {}, el("code", { className: `language-${languageOf(token)}` }, token.text)),
  mathBlock: ({ text }) => el("div", { className: "math-block" }, text),
  space: () => [],

  text: ({ text, tokens }) => (tokens ? tokens.flatMap(nodesOf) : decodeEntities(text)),
  escape: ({ text }) => text,
  strong: ({ tokens }) => fill(el("strong"), tokens),
  em: ({ tokens }) => fill(el("em"), tokens),
  del: ({ tokens }) => fill(el("del"), tokens),
  codespan: ({ text }) => el("code", {}, text),
  math: ({ text, display }) => el("span", { className: display ? "math-display" : "math" }, text),
  br: () => el("br"),
  link: ({ href, tokens }) => fill(anchor(href), tokens),
  // the page loads nothing from elsewhere, so an image becomes a link
  image: ({ href, text }) => fill(anchor(href), [{ type: "text", text: text || href }]),
  checkbox: ({ checked }) =>
    el("input", { type: "checkbox", defaultChecked: checked, disabled: true, "aria-label": checked ? "done" : "not done" }),
};

function anchor(href) {
  const element = el("a");
  element.setAttribute("href", encodeAddress(decodeEntities(href)));
  return element;
}

function encodeAddress(address) {
  try {
    return encodeURI(address).replaceAll("%25", "%");
  } catch {
    // half of a surrogate pair has no encoding
    return "";
  }
}

function decodeEntities(text) {
  return text.replace(ENTITY, (entity, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : entity;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}

function buildList({ ordered, start, items }) {
  const list = el(ordered ? "ol" : "ul");
  if (ordered) list.setAttribute("start", start);
  for (const { task, tokens } of items) list.append(fill(el("li", { className: task ? "task" : null }), tokens));
  return list;
}

function buildTable({ header, rows }) {
  const row = (tag, cells) => {
    const made = el("tr");
    for (const { align, tokens } of cells) made.append(fill(el(tag, { className: `align-${align ?? "left"}` }), tokens));
    return made;
  };
  const body = el("tbody");
  for (const cells of rows) body.append(row("td", cells));
  return el("table", {}, el("thead", {}, row("th", header)), body);
}

// Add to sanitized elements all that the model has no say in: where links open, copy buttons, boxes that scroll.
function decorate(element) {
  for (const link of element.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes);
    else Object.assign(link, { target: "_blank", rel: "noopener noreferrer", title: link.href });
  }
  for (const pre of element.querySelectorAll("pre")) {
    const { className, textContent } = pre.firstChild;
    pre.replaceWith(new CodeBlock(className.replace("language-", ""), linesOf(textContent)).element);
  }
  for (const table of element.querySelectorAll("table")) {
    const box = el("div", { className: "table", tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  for (const math of element.querySelectorAll(".math, .math-display, .math-block")) {
    showMath(math);
    // a box that scrolls has to be reachable from the keyboard
    if (!math.matches(".math")) math.tabIndex = 0;
  }
}
