// Divides markdown into blocks: each says its kind, the lines it spans, and what it holds. HTML has no meaning here.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const DIVIDER = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = { "$$": "$$", "\\[": "\\]" };
const DEEPEST = 12;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

// Give the blocks of these lines in order; `depth` counts the quotes and lists around them.
export function blocks(lines, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at, depth);
    found.push({ ...block, from: at });
    at = block.to;
  }
  return found;
}

function readBlock(lines, at, depth) {
  for (const read of depth < DEEPEST ? [fence, heading, rule, quote, list, table, math] : []) {
    const block = read(lines, at, depth);
    if (block) return block;
  }
  return paragraph(lines, at);
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, mark, info] = open;
  const indent = indentOf(lines[at]);
  const inside = [];
  let to = at + 1;
  for (; to < lines.length; to += 1) {
    const close = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(lines[to]);
    if (close && close[1][0] === mark[0] && close[1].length >= mark.length) break;
    inside.push(lines[to].slice(Math.min(indent, indentOf(lines[to]))));
  }
  const language = info.trim().split(/[\s{]/, 1)[0].toLowerCase();
  return { kind: "fence", language, lines: inside, to: Math.min(to + 1, lines.length) };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = (found[2] ?? "").trim().replace(/(^|[ \t])#+$/, "");
  return { kind: "heading", level: found[1].length, text: text.trim(), to: at + 1 };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", to: at + 1 } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  let to = at;
  for (; to < lines.length && !isBlank(lines[to]); to += 1) {
    if (!QUOTE.test(lines[to]) && interrupts(lines, to)) break;
    inside.push(lines[to].replace(QUOTE, ""));
  }
  return { kind: "quote", blocks: blocks(inside, depth + 1), to };
}

function marker(line) {
  const found = MARKER.exec(line);
  if (!found || RULE.test(line)) return null;
  const [whole, indent, mark, gap] = found;
  // more than four spaces after the mark belong to the content
  const width = gap && gap.length <= 4 ? whole.length : indent.length + mark.length + 1;
  return { indent: indent.length, width, kind: mark.at(-1), start: Number.parseInt(mark, 10) };
}

function list(lines, at, depth) {
  const first = marker(lines[at]);
  if (!first || first.indent > 3) return null;
  const items = [];
  let to = at;
  let loose = false;
  for (let mark = first; mark?.kind === first.kind && mark.indent < first.indent + 2; mark = marker(lines[to] ?? "")) {
    const item = itemAt(lines, to, mark);
    items.push(taskOf(item.lines, depth));
    loose ||= item.gap;
    const next = skipBlank(lines, item.to);
    if (marker(lines[next] ?? "")?.kind !== first.kind) {
      to = item.to;
      break;
    }
    loose ||= next > item.to;
    to = next;
  }
  const ordered = Number.isFinite(first.start);
  return { kind: "list", ordered, start: ordered ? first.start : null, loose, items, to };
}

function skipBlank(lines, at) {
  let to = at;
  while (to < lines.length && isBlank(lines[to])) to += 1;
  return to;
}

// The lines of one item without their indent. Two columns are enough to belong to it: models indent sparingly.
function itemAt(lines, at, mark) {
  const inside = [lines[at].slice(mark.width)];
  let gap = false;
  let to = at + 1;
  while (to < lines.length) {
    const next = skipBlank(lines, to);
    const line = lines[next];
    if (line === undefined) break;
    const indent = indentOf(line);
    const belongs = indent >= mark.indent + 2;
    const carriesOn = next === to && !marker(line) && !interrupts(lines, next);
    if (!belongs && !carriesOn) break;
    gap ||= next > to;
    for (; to < next; to += 1) inside.push("");
    inside.push(line.slice(Math.min(indent, mark.width)));
    to += 1;
  }
  return { lines: inside, to, gap };
}

function taskOf(lines, depth) {
  const task = /^\[([ xX])\][ \t]+/.exec(lines[0]);
  const rest = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  return { done: task ? task[1] !== " " : null, blocks: blocks(rest, depth + 1) };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function startsTable(lines, at) {
  const divider = lines[at + 1];
  if (!lines[at].includes("|") || divider === undefined || !DIVIDER.test(divider)) return false;
  return cells(lines[at]).length === cells(divider).length;
}

function table(lines, at) {
  if (!startsTable(lines, at)) return null;
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let to = at + 2;
  for (; to < lines.length && lines[to].includes("|"); to += 1) {
    const row = cells(lines[to]);
    rows.push(head.map((_, column) => row[column] ?? ""));
  }
  return { kind: "table", head, sides, rows, to };
}

function math(lines, at) {
  const open = Object.keys(MATH).find((mark) => lines[at].trim().startsWith(mark));
  if (!open) return null;
  const close = MATH[open];
  const inside = [];
  for (let to = at; to < lines.length && !isBlank(lines[to]); to += 1) {
    const line = to === at ? lines[to].trim().slice(open.length) : lines[to];
    const end = line.indexOf(close);
    if (end >= 0 && !isBlank(line.slice(end + close.length))) return null;
    inside.push(end < 0 ? line : line.slice(0, end));
    if (end >= 0) return { kind: "math", text: inside.join("\n").trim(), to: to + 1 };
  }
  return null;
}

// Whether a line ends the paragraph before it.
function interrupts(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const mark = marker(line);
  if (mark && mark.indent <= 3 && !isBlank(line.slice(mark.width))) return !Number.isFinite(mark.start) || mark.start === 1;
  return startsTable(lines, at);
}

function paragraph(lines, at) {
  let to = at + 1;
  while (to < lines.length && !isBlank(lines[to]) && !interrupts(lines, to)) to += 1;
  const text = lines.slice(at, to).map((line) => line.trimStart());
  return { kind: "paragraph", text: text.join("\n").trimEnd(), to };
}
