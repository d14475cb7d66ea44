// Turns a line of markdown into DOM nodes: code, links, emphasis. Delimiters are matched with a stack, as CommonMark
// does it, so that hostile text costs no more than any other.

import { el } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const DEEPEST = 24;
const TARGET = /\(\s*(<[^<>\n]*>|[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const BARE = /https?:\/\/[^\s<>"`]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]+|[^\s<>@:]+@[^\s<>@:]+)>/y;
const BREAK = /<br\s*\/?>/iy;
const ENTITY = /&(amp|lt|gt|quot|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0", "#39": "'" };
const depths = new WeakMap();

// Give the nodes that a piece of text stands for.
export function inline(text) {
  return new Scan(text).nodes();
}

// Make a link, or give null where the address is not one a reader should follow from here.
export function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!SCHEMES.has(url.protocol)) return null;
  const anchor = el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href });
  for (const child of children) anchor.append(child);
  return anchor;
}

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

class Scan {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.plain = "";
    // strings, nodes, runs of delimiters and open brackets, in order
    this.items = [];
    this.brackets = [];
    this.unclosed = new Set();
  }

  nodes() {
    while (this.at < this.text.length) {
      const char = this.text[this.at];
      const took = RULES[char]?.(this, char);
      if (!took) {
        this.plain += char;
        this.at += 1;
      }
    }
    this.flush();
    return nest(this.items);
  }

  flush() {
    if (this.plain) this.items.push(this.plain);
    this.plain = "";
  }

  add(item, length) {
    this.flush();
    this.items.push(item);
    this.at += length;
    return true;
  }

  // Take what stands between two marks as one piece, unread.
  between(open, close, make) {
    const from = this.at + open.length;
    if (!this.text.startsWith(open, this.at) || this.unclosed.has(close)) return false;
    const to = this.text.indexOf(close, from);
    if (to < 0) this.unclosed.add(close);
    if (to <= from) return false;
    return this.add(make(this.text.slice(from, to)), to + close.length - this.at);
  }
}

const math = (text) => el("span", { className: "math" }, text.trim());

function escape(scan) {
  const next = scan.text[scan.at + 1];
  if (next === "\n") return scan.add(el("br"), 2);
  if (scan.between("\\(", "\\)", math) || scan.between("\\[", "\\]", math)) return true;
  if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
  scan.plain += next;
  scan.at += 2;
  return true;
}

function code(scan) {
  const ticks = match(/`+/y, scan.text, scan.at)[0];
  const from = scan.at + ticks.length;
  let to = from;
  while (!scan.unclosed.has(ticks)) {
    to = scan.text.indexOf(ticks, to);
    if (to < 0) scan.unclosed.add(ticks);
    else if (scan.text[to + ticks.length] !== "`") break;
    else to += match(/`+/y, scan.text, to)[0].length;
  }
  if (scan.unclosed.has(ticks)) {
    scan.plain += ticks;
    scan.at = from;
    return true;
  }
  const inside = scan.text.slice(from, to).replace(/\n/g, " ");
  const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
  return scan.add(el("code", {}, padded ? inside.slice(1, -1) : inside), to + ticks.length - scan.at);
}

function angle(scan) {
  const lineBreak = match(BREAK, scan.text, scan.at);
  if (lineBreak) return scan.add(el("br"), lineBreak[0].length);
  const found = match(ANGLED, scan.text, scan.at);
  const anchor = found && link(/^(https?|mailto):/.test(found[1]) ? found[1] : `mailto:${found[1]}`, [found[1]]);
  return anchor ? scan.add(anchor, found[0].length) : false;
}

function bare(scan) {
  if (scan.at && /\w/.test(scan.text[scan.at - 1])) return false;
  let address = match(BARE, scan.text, scan.at)?.[0].replace(/[.,;:!?'*_~\]|]+$/, "");
  if (address?.endsWith(")") && !address.includes("(")) address = address.replace(/\)+[.,;:!?'*_~]*$/, "");
  const anchor = address && link(address, [address]);
  return anchor ? scan.add(anchor, address.length) : false;
}

function entity(scan) {
  const found = match(ENTITY, scan.text, scan.at);
  if (!found) return false;
  scan.plain += ENTITIES[found[1]];
  scan.at += found[0].length;
  return true;
}

function lineBreak(scan) {
  scan.plain = scan.plain.trimEnd();
  return scan.add(el("br"), 1);
}

function openBracket(scan, mark) {
  if (mark === "!" && scan.text[scan.at + 1] !== "[") return false;
  const text = mark === "!" ? "![" : "[";
  scan.add({ bracket: text }, text.length);
  scan.brackets.push(scan.items.length - 1);
  return true;
}

// an image becomes a link: the page loads nothing from elsewhere
function closeBracket(scan) {
  const opened = scan.brackets.pop();
  if (opened === undefined) return false;
  const target = match(TARGET, scan.text, scan.at + 1);
  if (!target) return false;
  scan.flush();
  const inside = nest(scan.items.splice(opened + 1));
  const { bracket } = scan.items.pop();
  const anchor = link(target[1].replace(/^<|>$/g, ""), inside);
  if (anchor) scan.items.push(anchor);
  else for (const node of inside) scan.items.push(node);
  // links do not hold links
  if (bracket === "[" && anchor) scan.brackets = [];
  scan.at += 1 + target[0].length;
  return true;
}

function delimiter(scan, mark) {
  const run = match(mark === "*" ? /\*+/y : mark === "_" ? /_+/y : /~+/y, scan.text, scan.at)[0];
  const before = scan.text[scan.at - 1] ?? " ";
  const after = scan.text[scan.at + run.length] ?? " ";
  const [left, right] = [flanks(after, before), flanks(before, after)];
  const inWord = mark === "_" && left && right;
  const strike = mark !== "~" || run.length === 2;
  const opens = left && strike && (!inWord || isPunctuation(before));
  const closes = right && strike && (!inWord || isPunctuation(after));
  return scan.add({ mark, count: run.length, length: run.length, opens, closes }, run.length);
}

const isPunctuation = (char) => /[\p{P}\p{S}]/u.test(char);
const flanks = (inner, outer) => !/\s/.test(inner) && (!isPunctuation(inner) || /\s/.test(outer) || isPunctuation(outer));

const RULES = {
  "\\": escape, "`": code, "<": angle, "&": entity, "\n": lineBreak, h: bare, "[": openBracket, "!": openBracket,
  "]": closeBracket, "*": delimiter, "_": delimiter, "~": delimiter, $: (scan) => scan.between("$$", "$$", math),
};

// Match closing runs with the openers before them and give the nodes.
function nest(items) {
  const out = [];
  const floors = new Map();
  for (const item of items) {
    while (item.closes && item.count) {
      const key = `${item.mark}${item.opens}${item.length % 3}`;
      const found = findOpener(out, item, floors.get(key) ?? 0);
      if (found === null) {
        floors.set(key, out.length);
        break;
      }
      wrap(out, found, item);
      for (const [name, floor] of floors) floors.set(name, Math.min(floor, out.length));
    }
    if (item.count !== 0) out.push(item);
  }
  return out.map(asNode);
}

function findOpener(out, closer, floor) {
  for (let at = out.length - 1; at >= floor; at -= 1) {
    const one = out[at];
    if (one.mark !== closer.mark || !one.opens || !one.count) continue;
    const uneven = (one.closes || closer.opens) && (one.length + closer.length) % 3 === 0;
    if (!uneven || (one.length % 3 === 0 && closer.length % 3 === 0)) return at;
  }
  return null;
}

function wrap(out, found, closer) {
  const opener = out[found];
  const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
  const inside = out.splice(found + 1).map(asNode);
  opener.count -= used;
  closer.count -= used;
  if (!opener.count) out.pop();
  const depth = 1 + inside.reduce((most, node) => Math.max(most, depths.get(node) ?? 0), 0);
  if (depth > DEEPEST) {
    out.push(inside.map((node) => node.textContent ?? node).join(""));
    return;
  }
  const tag = closer.mark === "~" ? "del" : used === 2 ? "strong" : "em";
  const element = el(tag);
  for (const node of inside) element.append(node);
  depths.set(element, depth);
  out.push(element);
}

function asNode(item) {
  if (item.bracket) return item.bracket;
  if (item.mark) return item.mark.repeat(item.count);
  return item;
}
