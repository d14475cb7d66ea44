"""Markdown as the page draws it in a real browser."""

import pytest

from tests.serve.page_stub import ANSWER, HOSTILE

pytestmark = pytest.mark.slow

RENDER = """async (text) => {
  const { Rendering } = await import("/static/render.js");
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


@pytest.mark.parametrize("text", [ANSWER, HOSTILE], ids=["answer", "hostile"])
def test_text_that_grows_looks_as_if_it_had_come_at_once(page, text):
    assert page.evaluate(RENDER, text) == []


HTML = """async (text) => {
  const { Rendering } = await import("/static/render.js");
  const root = document.createElement("div");
  new Rendering(root).update(text);
  for (const a of root.querySelectorAll("a")) for (const name of ["target", "rel", "title"]) a.removeAttribute(name);
  return root.getHTML();
}"""

MARKDOWN = {
    "**a** *b* `c` ~~d~~": "<p><strong>a</strong> <em>b</em> <code>c</code> <del>d</del></p>",
    "***a***": "<p><em><strong>a</strong></em></p>",
    "snake_case_word, **open": "<p>snake_case_word, **open</p>",
    "a\nb": "<p>a<br>b</p>",
    "1. a\n   - b\n2. c": '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n# b\n---": '<p>a</p><h3 class="level-1">b</h3><hr>',
    "[a](https://e.com/(b))": '<p><a href="https://e.com/(b)">a</a></p>',
    "(https://e.com/b).": '<p>(<a href="https://e.com/b">https://e.com/b</a>).</p>',
    "[a](javascript:b) [c](data:d) [e](/f)": "<p>a c e</p>",
    "<b>a</b> &lt;": "<p>&lt;b&gt;a&lt;/b&gt; &lt;</p>",
    "\\(a_b*c*\\) $5": '<p><span class="math">a_b*c*</span> $5</p>',
}


def test_markdown_means_what_readers_expect(page):
    assert {text: page.evaluate(HTML, text) for text in MARKDOWN} == MARKDOWN


@pytest.mark.parametrize("text", ["*a _b " * 5000 + "c_ d*" * 5000, "[" * 50_000, ">" * 50_000, "`" * 9 + "`` ` " * 9000])
def test_hostile_markdown_is_drawn(page, text):
    length = "async (text) => { const root = document.createElement('div'); document.body.append(root);"
    length += "new (await import('/static/render.js')).Rendering(root).update(text); return root.offsetHeight; }"
    assert page.evaluate(length, text) > 0
