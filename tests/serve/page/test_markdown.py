"""The page's markdown renderer in a real browser."""

import pytest

from tests.serve.page_stub import ANSWER, HOSTILE, MATHS

pytestmark = pytest.mark.slow

RENDER = """async (text) => {
  const { Rendering } = await import("/static/markdown/render.js");
  const whole = (part) => {
    const root = document.createElement("div");
    new Rendering(root).update(part);
    return root.outerHTML;
  };
  const root = document.createElement("div");
  const grown = new Rendering(root);
  const wrong = [];
  for (let end = 1; end <= text.length; end += 1) {
    grown.update(text.slice(0, end));
    if (root.outerHTML !== whole(text.slice(0, end))) wrong.push(end);
  }
  return wrong;
}"""


FEATURES = (
    "Title\r\n=====\r\n\r\n- [x] done\n- [ ] open\n  ```js\n  let a = 1;\n  ```\n\n> quote\nlazy\n> - a\n\n"
    "2) two\n\n3) three\n\n"
    "$$\nx_1 + *y*\n$$\n\nThus \\(a\\) and $$b$$.\n| a | b |\n|:-:|--|\n| x<br>y | `|` |\n\n***\n[r][1] &amp; &#x41;\n\n[1]: https://e.com\n"
)


@pytest.mark.parametrize("text", [ANSWER, HOSTILE, MATHS, FEATURES], ids=["answer", "hostile", "maths", "features"])
def test_incremental_rendering_matches_full_rendering(page, text):
    assert page.evaluate(RENDER, text) == []


HTML = """async (text) => {
  const { Rendering } = await import("/static/markdown/render.js");
  const root = document.createElement("div");
  new Rendering(root).update(text);
  for (const a of root.querySelectorAll("a")) for (const name of ["target", "rel", "title"]) a.removeAttribute(name);
  return root.getHTML();
}"""

DISPLAY = '<math display="block" class="tml-display" style="display: block math;">'

MARKDOWN = {
    "**a** *b* `c` ~~d~~": "<p><strong>a</strong> <em>b</em> <code>c</code> <del>d</del></p>",
    "***a***": "<p><em><strong>a</strong></em></p>",
    "snake_case_word, **open": "<p>snake_case_word, **open</p>",
    "a\nb": "<p>a<br>b</p>",
    "1. a\n   - b\n2. c": '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n# b\n---": '<p>a</p><h3 class="level-1">b</h3><hr>',
    "## a\n### b\n###### c": '<h3 class="level-2">a</h3><h4 class="level-3">b</h4><h6 class="level-6">c</h6>',
    "[a](https://e.com/(b))": '<p><a href="https://e.com/(b)">a</a></p>',
    "(https://e.com/b).": '<p>(<a href="https://e.com/b">https://e.com/b</a>).</p>',
    "[a](javascript:b) [c](data:d) [e](/f)": "<p>a c e</p>",
    "<b>a</b> &lt;": "<p>&lt;b&gt;a&lt;/b&gt; &lt;</p>",
    "- [x] a": '<ul><li class="task"><input type="checkbox" checked="" disabled="" aria-label="done">a</li></ul>',
    "$$\na\n$$": f'<div class="math-block" tabindex="0">{DISPLAY}<mi>a</mi></math></div>',
    "a\n\\[b\\]": f'<p>a<br><span class="math-display" tabindex="0">{DISPLAY}<mi>b</mi></math></span></p>',
    "![a](https://e.com/b.png)": '<p><a href="https://e.com/b.png">a</a></p>',
    "&amp; &#65; &nope; `&lt;`": "<p>&amp; A &amp;nope; <code>&amp;lt;</code></p>",
    "\\(a_b\\) $5": '<p><span class="math"><math><msub><mi>a</mi><mi>b</mi></msub></math></span> $5</p>',
    "$a$, $6-$7, US$8 and $x$y $ z$": '<p><span class="math"><math><mi>a</mi></math></span>, $6-$7, US$8 and $x$y $ z$</p>',
    "$*a*^$ \\(": '<p><span class="math math-source">*a*^</span> (</p>',
}


def test_markdown_renders_to_expected_html(page):
    assert {text: page.evaluate(HTML, text) for text in MARKDOWN} == MARKDOWN


@pytest.mark.parametrize(
    "text",
    ["*a _b " * 5000 + "c_ d*" * 5000, "[" * 50_000, ">" * 50_000, "`" * 9 + "`` ` " * 9000, "\\[" * 20_000, "$a" * 20_000],
)
def test_pathological_markdown_is_rendered(page, text):
    length = "async (text) => { const root = document.createElement('div'); document.body.append(root);"
    length += "new (await import('/static/markdown/render.js')).Rendering(root).update(text); return root.offsetHeight; }"
    assert page.evaluate(length, text) > 0


LEX = """async (text) => {
  const { lex } = await import("/static/markdown/lexer.js");
  const start = performance.now();
  lex(text);
  return performance.now() - start;
}"""


@pytest.mark.parametrize("delimiter", ["\\[", "\\(", "\\[ a", "$$ ", "$a ", "\\begin{align}\n\n"])
def test_unclosed_math_takes_linear_time(page, delimiter):
    # milliseconds; a quadratic scan takes 2,000 to 6,000
    assert page.evaluate(LEX, delimiter * 20_001) < 1500


STREAM = """async (count) => {
  const { Rendering } = await import("/static/markdown/render.js");
  const root = document.createElement("div");
  const rendering = new Rendering(root);
  let text = "";
  let first = null;
  let moved = 0;
  let longest = 0;
  for (let at = 0; at < count; at += 1) {
    text += `Paragraph ${at} with **bold** and \\`code\\`.\n\n`;
    rendering.update(text);
    first ??= root.firstChild;
    if (root.firstChild !== first) moved += 1;
    longest = Math.max(longest, text.length - rendering.final);
  }
  return { moved, longest, blocks: root.children.length };
}"""


def test_final_blocks_are_not_rebuilt(page):
    found = page.evaluate(STREAM, 500)
    assert found["moved"] == 0
    assert found["blocks"] == 500
    # at most two open blocks, for any response length
    assert found["longest"] < 120
