// Highlights a line of code: comments, strings, numbers and keywords. A long string or comment that stays open passes its
// closing delimiter to the next line.

const SETS = {
  python: `and as assert async await break case class continue def del elif else except finally for from global if import in is
    lambda match nonlocal not or pass raise return try while with yield None True False self`,
  script: `async await break case catch class const continue debugger default delete do else enum export extends finally for
    from function if implements import in instanceof interface let new null of return static super switch this throw true false
    try type typeof undefined var void while yield`,
  c: `abstract alignas async auto await bool boolean break byte case catch char class const constexpr continue crate default defer
    delete do double dyn else enum explicit extends extern false final float fn for func go goto if impl implements import in
    inline int interface internal let long loop match mod mut namespace new nil noexcept null nullptr object operator override
    package private protected pub public range ref return self short signed sizeof static struct super switch template this
    throw trait true try type typedef typename union unsafe unsigned use using val var virtual void volatile when where while`,
  shell: `case do done elif else esac export fi for function if in local return set then until while`,
  sql: `add all alter and as asc between by case create delete desc distinct drop else end exists foreign from full group having
    if in index inner insert into is join key left like limit not null offset on or order outer primary references right select
    set table then union unique update using values view when where with`,
  data: `true false null yes no on off`,
};

const HASH = { line: "#" };
const SLASHES = { line: "//", open: "/*", close: "*/" };
const FORMS = {
  python: { ...HASH, words: SETS.python, long: ['"""', "'''"] },
  script: { ...SLASHES, words: SETS.script, long: ["`"] },
  c: { ...SLASHES, words: SETS.c, long: [] },
  shell: { ...HASH, words: SETS.shell, long: [] },
  sql: { line: "--", open: "/*", close: "*/", words: SETS.sql, long: [], anyCase: true },
  data: { ...HASH, words: SETS.data, long: [] },
  json: { words: SETS.data, long: [] },
  css: { open: "/*", close: "*/", words: "", long: [] },
  markup: { open: "<!--", close: "-->", words: "", long: [] },
};

const NAMES = {
  python: "python py python3 pyi", script: "javascript js jsx typescript ts tsx mjs", sql: "sql postgresql sqlite mysql",
  c: "c cpp c++ h hpp cs csharp cuda java kotlin kt go golang rust rs swift scala dart zig php", json: "json jsonc json5",
  shell: "bash sh shell zsh console dockerfile makefile make", data: "yaml yml toml ini conf", css: "css scss less",
  markup: "html xml svg vue",
};

const forms = new Map();
for (const [form, names] of Object.entries(NAMES)) {
  const { words, ...rest } = FORMS[form];
  const made = { ...rest, words: new Set(words.split(/\s+/)), pattern: pattern(FORMS[form]) };
  for (const name of names.split(" ")) forms.set(name, made);
}

function pattern({ line, open, long }) {
  const literal = (text) => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
  const starts = line === "#" ? "(?<![\\w$&])#.*" : line ? `${literal(line)}.*` : null;
  const parts = [
    starts && `(?<comment>${starts})`,
    (open || long.length) && `(?<open>${[open, ...long].filter(Boolean).map(literal).join("|")})`,
    `(?<string>"(?:\\\\.|[^"\\\\])*"?|'(?:\\\\.|[^'\\\\])*'?)`,
    "(?<number>\\b(?:0[xXbB][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
    "(?<word>[A-Za-z_]\\w*)",
  ];
  return new RegExp(parts.filter(Boolean).join("|"), "g");
}

// Return the parts of a line as [kind, text], with kind null for plain text, and the delimiter that is still open.
export function highlight(line, language, closing = null) {
  const form = forms.get(language);
  if (!form) return { parts: [[null, line]], closing: null };
  const parts = [];
  let at = 0;
  let within = closing;
  while (at < line.length) {
    if (within) {
      const to = line.indexOf(within, at);
      const end = to < 0 ? line.length : to + within.length;
      parts.push([within === form.close ? "comment" : "string", line.slice(at, end)]);
      at = end;
      if (to < 0) break;
      within = null;
      continue;
    }
    form.pattern.lastIndex = at;
    const found = form.pattern.exec(line);
    if (!found) break;
    if (found.index > at) parts.push([null, line.slice(at, found.index)]);
    at = found.index + found[0].length;
    const kind = kindOf(found, form);
    parts.push([kind, found[0]]);
    if (found.groups.open) within = found[0] === form.open ? form.close : found[0];
  }
  if (at < line.length) parts.push([null, line.slice(at)]);
  return { parts, closing: within };
}

function kindOf({ 0: text, groups }, form) {
  if (groups.comment || (groups.open && groups.open === form.open)) return "comment";
  if (groups.string || groups.open) return "string";
  if (groups.number) return "number";
  return form.words.has(form.anyCase ? text.toLowerCase() : text) ? "keyword" : null;
}
