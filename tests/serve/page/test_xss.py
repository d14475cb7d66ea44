"""Attempts to make the page execute code from model output."""

import pytest

pytestmark = pytest.mark.slow

ATTEMPTS = [
    "<script>window.hurt=1</script>",
    "text <script src=https://evil.test/x.js></script>",
    "<img src=x onerror=window.hurt=1>",
    "<IMG SRC=x OnError=window.hurt=1 //",
    "<svg onload=window.hurt=1>",
    "<svg><script>window.hurt=1</script></svg>",
    '<svg><a xlink:href="javascript:window.hurt=1"><text>x</text></a></svg>',
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hurt=1>",
    "<iframe src=javascript:window.hurt=1></iframe>",
    '<iframe srcdoc="<script>parent.hurt=1</script>"></iframe>',
    "<object data=javascript:window.hurt=1></object><embed src=javascript:window.hurt=1>",
    "<form action=javascript:window.hurt=1><button>x</button></form>",
    "<style>@import 'https://evil.test/x.css'</style><link rel=stylesheet href=https://evil.test/x.css>",
    "<base href=https://evil.test/><meta http-equiv=refresh content='0;url=https://evil.test/'>",
    "<details open ontoggle=window.hurt=1>x</details>",
    "[a](javascript:window.hurt=1)",
    "[a](JaVaScRiPt:window.hurt=1)",
    "[a](<java\tscript:window.hurt=1>)",
    "[a](&#106;avascript:window.hurt=1)",
    "[a](javascript&colon;window.hurt=1)",
    "[a](\x01javascript:window.hurt=1)",
    "[a](vbscript:window.hurt=1) [b](file:///etc/passwd) [c](blob:x)",
    "[a](data:text/html,<script>window.hurt=1</script>)",
    "![a](data:image/svg+xml,<svg onload=window.hurt=1>)",
    "![a](javascript:window.hurt=1)",
    "![a](https://evil.test/x.png)",
    '[a](https://e.com/"onmouseover="window.hurt=1)',
    '[a](https://e.com "t" onmouseover="window.hurt=1")',
    "<javascript:window.hurt=1> <https://e.com/?<script>window.hurt=1</script>>",
    "[a](//evil.test/x) [b](/v1/models) [c](?q) [d](#x)",
    "[a]: javascript:window.hurt=1\n\n[a]",
    "```html\n<script>window.hurt=1</script><img src=x onerror=window.hurt=1>\n```",
    '```"><script>window.hurt=1</script>\nx\n```',
    "`<img src=x onerror=window.hurt=1>`",
    "| <img src=x onerror=window.hurt=1> |\n|---|\n| <script>window.hurt=1</script> |",
    "$$<img src=x onerror=window.hurt=1>$$ \\(<script>window.hurt=1</script>\\)",
    r"$\href{javascript:window.hurt=1}{x}$ $\url{javascript:window.hurt=1}$ $\includegraphics{https://evil.test/x.png}$",
    r"$\text{<img src=x onerror=window.hurt=1>}$ $\class{x}{y}$ $\style{position:fixed}{x}$ $\data{onclick=window.hurt=1}{x}$",
    r"$\htmlClass{x}{y}$ $\htmlStyle{position:fixed}{x}$ $$\def\x{\x\x}\x$$ $\rule{1000em}{1000em}$ $\label{\"onclick=hurt}$",
    "# <svg onload=window.hurt=1>\n> - <img src=x onerror=window.hurt=1>\n>   1. <script>window.hurt=1</script>",
    "<!-- --><script>window.hurt=1</script>-->",
    "<a href='https://e.com' onclick='window.hurt=1' style='position:fixed;inset:0'>x</a>",
]

# without the copy button, which the page adds
RENDER = """async (text) => {
  const { Rendering } = await import("/static/markdown/render.js");
  const root = document.body.appendChild(document.createElement("div"));
  const rendering = new Rendering(root);
  for (let end = 1; end <= text.length; end += 1) rendering.update(text.slice(0, end));
  for (const button of root.querySelectorAll("button")) button.remove();
  await new Promise((resolve) => setTimeout(resolve, 20));
  const all = [...root.querySelectorAll("*")];
  return {
    hurt: window.hurt ?? null,
    tags: all.map((one) => one.localName),
    attributes: all.flatMap((one) => one.getAttributeNames()),
    links: all.filter((one) => one.localName === "a").map((one) => [one.protocol, one.rel, one.target]),
  };
}"""

TAGS = {
    *("a", "blockquote", "br", "code", "del", "div", "em", "figcaption", "figure", "h3", "h4", "h5", "h6", "hr", "input", "li"),
    *("ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
    *("math", "mi", "mn", "mo", "mrow", "mspace", "mtext"),
}
MATH_ATTRIBUTES = {"mathbackground", "width", "height", "display", "style"}
ATTRIBUTES = MATH_ATTRIBUTES | {
    "aria-label",
    "checked",
    "class",
    "disabled",
    "href",
    "rel",
    "start",
    "tabindex",
    "target",
    "title",
    "type",
}


def is_harmless(found: dict) -> bool:
    links = all(protocol in ("http:", "https:", "mailto:") for protocol, *_ in found["links"])
    opened = all(rest == ["noopener noreferrer", "_blank"] for _, *rest in found["links"])
    return found["hurt"] is None and set(found["tags"]) <= TAGS and set(found["attributes"]) <= ATTRIBUTES and links and opened


def test_markdown_cannot_run_code(page):
    found = {text: page.evaluate(RENDER, text) for text in ATTEMPTS}
    assert {text: each for text, each in found.items() if not is_harmless(each)} == {}


SANITIZE = """async () => {
  const { sanitize } = await import("/static/markdown/sanitize.js");
  const make = (tag, attributes = {}) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const root = make("div", { id: "x", "data-x": "1" });
  root.append(
    make("img", { alt: "x" }), make("script"), make("style"), make("iframe"), make("form"), make("template"),
    document.createElementNS("http://www.w3.org/2000/svg", "svg"), document.createComment("x"),
    make("a", { href: "javascript:1" }), make("a", { href: "data:text/html,x" }), make("a", { href: "/x" }),
    make("a", { href: "https://e.com/", target: "x", ping: "https://e.com" }), make("b"), make("em", { class: "y" }),
  );
  return sanitize(root).outerHTML;
}"""


def test_sanitizer_removes_disallowed_markup(page):
    links = '<a></a><a></a><a></a><a href="https://e.com/"></a>'
    assert page.evaluate(SANITIZE) == f'<div>{links}<em class="y"></em></div>'
