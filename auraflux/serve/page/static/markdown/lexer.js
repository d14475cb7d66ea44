// Splits markdown into tokens with the vendored marked. HTML has no meaning here: it stays text.

import { Lexer, Marked, Tokenizer } from "../vendor/marked.esm.js";

// Quotes, lists, emphasis and links nest by recursion; the limit protects the stack from hostile input.
const MAX_DEPTH = 16;
const MAX_MATH = 4000; // characters of a formula
const MATH_DELIMITERS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"]];
// single dollars hold no space at their inner sides, and no letter or digit follows: "$5 and $10" is money
const DOLLAR_MATH = /^\$((?:\\[^]|[^\\$])+)\$(?![\w$])/;
const ENVIRONMENT = /^\\begin\{(equation|align|alignat|gather|multline)(\*?)\}/;

class TextTokenizer extends Tokenizer {
  depth = 0;

  nest(read) {
    if (this.depth >= MAX_DEPTH) return undefined;
    this.depth += 1;
    try {
      return read();
    } finally {
      this.depth -= 1;
    }
  }

  blockquote(...args) {
    return this.nest(() => super.blockquote(...args));
  }

  list(...args) {
    return this.nest(() => super.list(...args));
  }

  emStrong(...args) {
    return this.nest(() => super.emStrong(...args));
  }

  del(...args) {
    return this.nest(() => super.del(...args));
  }

  link(...args) {
    return this.nest(() => super.link(...args));
  }

  html() {
    return undefined;
  }

  // models break lines inside table cells with this one tag
  tag(source) {
    const found = /^<br\s*\/?>/i.exec(source);
    return found ? { type: "br", raw: found[0] } : undefined;
  }

  // a definition can arrive after the blocks that use it are final
  def() {
    return undefined;
  }
}

// Return where a formula ends, or -1. The next opening delimiter ends the scan, so that delimiters that never close cost linear
// time. Escapes are read in pairs: the line break `\\[2pt]` opens nothing.
function mathEnd(source, open, close) {
  const text = source.slice(0, MAX_MATH);
  if (open === close) return text.indexOf(close, 2);
  const escape = /\\[^]/g;
  escape.lastIndex = 2;
  for (let found = escape.exec(text); found && found[0] !== open; found = escape.exec(text)) {
    if (found[0] === close) return found.index;
  }
  return -1;
}

function inlineMath(source) {
  const pair = MATH_DELIMITERS.find(([open]) => source.startsWith(open));
  if (!pair) return dollarMath(source);
  const end = mathEnd(source, ...pair);
  if (end <= 2) return undefined;
  return { type: "math", display: pair[0] !== "\\(", raw: source.slice(0, end + 2), text: source.slice(2, end).trim() };
}

function dollarMath(source) {
  const found = DOLLAR_MATH.exec(source.slice(0, MAX_MATH));
  if (!found || found[1] !== found[1].trim()) return undefined;
  return { type: "math", display: false, raw: found[0], text: found[1] };
}

function environment(source) {
  const found = ENVIRONMENT.exec(source);
  if (!found) return undefined;
  const close = `\\end{${found[1]}${found[2]}}`;
  const end = source.slice(0, MAX_MATH).indexOf(close);
  if (end < 0) return undefined;
  const raw = source.slice(0, end + close.length);
  return { raw, text: raw };
}

function blockMath(source) {
  const indent = /^ {0,3}(?=\$\$|\\\[|\\begin\{)/.exec(source)?.[0].length;
  const text = source.slice(indent);
  const math = indent === undefined ? undefined : (environment(text) ?? inlineMath(text));
  if (!math || /\n[ \t]*\n/.test(math.raw)) return undefined;
  const rest = /^[ \t]*(?:\n|$)/.exec(source.slice(indent + math.raw.length));
  if (!rest) return undefined;
  return { type: "mathBlock", raw: source.slice(0, indent + math.raw.length + rest[0].length), text: math.text };
}

const options = new Marked({
  gfm: true,
  breaks: true,
  extensions: [
    { name: "mathBlock", level: "block", tokenizer: blockMath },
    { name: "math", level: "inline", start: (source) => source.indexOf("$"), tokenizer: inlineMath },
  ],
}).defaults;

// Return the block tokens of `text`, which has no carriage returns. The `raw` fields of the tokens join to `text`.
export function lex(text) {
  try {
    const lexer = new Lexer({ ...options, tokenizer: new TextTokenizer() });
    // without definitions no reference matches, and the search for them is slow on many brackets
    const { rules } = lexer.tokenizer;
    lexer.tokenizer.rules = { ...rules, inline: { ...rules.inline, reflinkSearch: /(?!)/g } };
    return lexer.lex(text);
  } catch {
    return [{ type: "paragraph", raw: text, tokens: [{ type: "text", raw: text, text }] }];
  }
}
