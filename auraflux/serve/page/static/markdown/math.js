// Renders TeX as MathML with the vendored Temml. Its elements are sanitized like everything that a model writes.

import "../vendor/purify.min.js";
import { el } from "../view/dom.js";

const temml = globalThis.temml;

const OPTIONS = {
  throwOnError: true,
  trust: false,
  maxExpand: 200,
  maxSize: [20, 40], // em
  // these two would set a style attribute, which the page's policy refuses
  macros: { "\\pmb": "\\boldsymbol{#1}", "\\sideset": "{}#1{#3}#2" },
};

// an instance of its own: MathML is allowed in formulas only
const purify = globalThis.DOMPurify(window);

purify.setConfig({
  IN_PLACE: true,
  TRUSTED_TYPES_POLICY: null,
  ALLOWED_TAGS: [
    "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts", "mroot", "mrow", "ms",
    "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "math", "span",
  ],
  // the policy of the page lets a script set styles, but no attribute
  ALLOWED_ATTR: [
    "accent", "accentunder", "class", "columnalign", "columnlines", "columnspacing", "depth", "display", "displaystyle", "fence",
    "form", "height", "largeop", "linebreak", "linethickness", "lspace", "mathbackground", "mathcolor", "mathsize", "mathvariant",
    "maxsize", "minsize", "movablelimits", "notation", "rowlines", "rowspacing", "rspace", "scriptlevel", "separator", "stretchy",
    "style", "symmetric", "voffset", "width",
  ],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
});

// Replace the TeX in `element` by its formula. TeX with mistakes stays as it is.
export function showMath(element) {
  const source = element.textContent;
  const display = element.matches(".math-block, .math-display");
  const made = el("span");
  try {
    temml.render(source, made, { ...OPTIONS, displayMode: display, wrap: display ? "none" : "tex" });
    element.replaceChildren(...purify.sanitize(made).childNodes);
  } catch {
    element.classList.add("math-source");
  }
}
