"""The chat page in a real browser against a stub server."""

import json

import pytest

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.service import Service
from tests.serve.fake_link import FakeLink, serving
from tests.serve.page.conftest import ask
from tests.serve.page_stub import ANSWER, THOUGHT

expect = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed").expect
pytestmark = pytest.mark.slow


def click_action(page, which, label: str) -> None:
    which.hover()
    which.get_by_label(label).click()


def test_response_shows_reasoning_and_statistics(page, site):
    expect(page.locator("#server-text")).to_have_text("example-model")
    ask(page, "a thought about caches")
    reply = page.locator(".reply")
    expect(reply.locator(".level-2").first).to_have_text("What is stored")
    expect(reply.locator("td").first).to_have_text("bf16")
    expect(reply.locator("figcaption span")).to_have_text("python")
    expect(reply.locator(".code-keyword").first).to_have_text("def")
    assert reply.locator("summary").inner_text().startswith("Thought for ")
    assert reply.locator(".thought-text").text_content() == THOUGHT
    assert reply.locator(".thought-text").is_hidden()
    figures = reply.locator("dd").all_inner_texts()
    assert figures == [
        "41.9 tokens/s",
        "first token 0.31 s",
        "318 tokens",
        "0 of 1,024 prompt tokens cached",
        "cache 70.5 MB (188 MB uncompressed)",
    ]
    received = site.received[0]
    assert received["stream"] is True
    assert received["stream_options"] == {"include_usage": True}
    assert received["model"] == "example-model"
    assert "temperature" not in received
    ask(page, "and then?")
    first, second, third = site.received[1]["messages"]
    assert first == {"role": "user", "content": "a thought about caches"}
    assert second == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    assert third == {"role": "user", "content": "and then?"}


def test_model_output_is_never_markup(page):
    ask(page, "hostile")
    reply = page.locator(".reply .prose")
    assert page.evaluate("window.hurt") is None
    assert reply.locator("img, script, b, :not(.icon) > svg:not(.icon)").count() == 0
    assert '<img src=x onerror="window.hurt=1"><script>' in reply.inner_text()
    links = reply.locator("a")
    assert links.evaluate_all("all => all.map(a => [a.protocol, a.rel, a.target])") == [
        ["https:", "noopener noreferrer", "_blank"],
        ["https:", "noopener noreferrer", "_blank"],
    ]


def test_content_security_policy_refuses_markup(page):
    refused = "(() => { try { document.body.innerHTML = 'x'; return false } catch (error) { return error.name } })()"
    assert page.evaluate(refused) == "TypeError"


def test_stopping_saves_the_partial_response(page):
    ask(page, "slow please", finished=False)
    expect(page.locator(".reply .prose")).to_contain_text("A cache")
    page.keyboard.press("Escape")
    expect(page.locator(".reply .problem span")).to_have_text("Stopped.")
    partial = page.locator(".reply .prose").inner_text()
    assert partial.startswith("A cache")
    figures = page.locator(".reply dd")
    expect(figures.first).to_contain_text("tokens/s")
    # the server counted what had arrived
    expect(figures.nth(2)).to_have_text(f"{len(partial) // 4} tokens")
    page.reload()
    expect(page.locator(".reply .prose")).to_have_text(partial)


def test_edits_and_retries_create_branches(page, site):
    ask(page, "first")
    click_action(page, page.locator(".reply"), "Answer again")
    expect(page.locator(".reply .versions")).to_have_text("2/2")
    click_action(page, page.locator(".question"), "Edit and send again")
    page.get_by_label("Edit your message").fill("second")
    page.keyboard.press("Enter")
    expect(page.locator(".question .bubble")).to_have_text("second")
    expect(page.locator(".question .versions")).to_have_text("2/2")
    assert [body["messages"][-1]["content"] for body in site.received] == ["first", "first", "second"]
    click_action(page, page.locator(".question"), "Earlier version")
    expect(page.locator(".question .bubble")).to_have_text("first")
    expect(page.locator(".reply .versions")).to_have_text("2/2")
    click_action(page, page.locator(".question"), "Delete from here on")
    expect(page.locator(".question .bubble")).to_have_text("second")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".question .bubble")).to_have_text("first")


def test_conversations_are_saved_searched_exported_and_imported(page, tmp_path):
    ask(page, "about apples")
    page.click("#new")
    ask(page, "about pears")
    page.reload()
    titles = page.locator("#conversations .open")
    expect(titles).to_have_text(["about pears", "about apples"])
    page.fill("#search", "apples")
    expect(titles).to_have_text(["about apples"])
    page.fill("#search", "")
    page.click("#open-settings")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "out.json"
    download.value.save_as(file)
    page.set_input_files("#import-file", file)
    page.click("#close-settings")
    expect(titles).to_have_count(4)
    click_action(page, page.locator("#conversations li").first, "Delete conversation")
    expect(titles).to_have_count(3)
    exported = json.loads(file.read_text())["conversations"]
    assert sorted(one["title"] for one in exported) == ["about apples", "about pears"]
    assert exported[0]["messages"][1]["content"] == ANSWER


def test_a_file_that_is_not_an_export_is_refused(page, tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"conversations": 3}')
    page.set_input_files("#import-file", file)
    expect(page.locator("#note")).to_have_text("The file holds no conversations exported from this page.")


def test_page_waits_for_a_loading_model(page, site):
    expect(page.locator("#server-text")).to_have_text("example-model")
    site.app.state.loading = 2
    ask(page, "wait for it")
    assert len(site.received) == 3
    expect(page.locator(".reply .level-2").first).to_be_visible()


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("broken", "The engine stopped."),
        ("cut", "The connection was lost before the answer was complete."),
        ("refuse", "The prompt has 200,000 tokens and the context holds 131,072."),
    ],
)
def test_failures_are_shown_and_can_be_retried(page, site, question, problem):
    ask(page, question)
    expect(page.locator(".problem.failed")).to_contain_text(problem)
    # one retry button, and no copy button for an empty response
    expect(page.get_by_role("button", name="Answer again")).to_be_hidden()
    expect(page.get_by_role("button", name="Copy answer")).to_be_visible(visible=question != "refuse")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".reply .versions")).to_have_text("2/2")
    assert len(site.received) == 2


def test_scroll_position_is_stable_while_streaming(page):
    ask(page, "long")
    ask(page, "slow long", finished=False)
    expect(page.locator(".reply").nth(1).locator(".level-2").first).to_be_visible()
    box = page.locator("#scroll")
    at_end = "box => box.scrollHeight - box.scrollTop - box.clientHeight < 40"
    assert box.evaluate(at_end)
    box.hover()
    page.mouse.wheel(0, -1500)
    expect(page.locator("#jump")).to_be_visible()
    top = box.evaluate("box => box.scrollTop")
    height = box.evaluate("box => box.scrollHeight")
    page.wait_for_function("height => document.getElementById('scroll').scrollHeight > height + 60", arg=height)
    assert box.evaluate("box => box.scrollTop") == top
    page.click("#jump")
    assert box.evaluate(at_end)


def test_layout_fits_a_phone(browser, site):
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(site.url)
    ask(page, "thought")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#scroll").evaluate("box => box.scrollWidth") == 360
    assert page.locator("#sidebar").is_hidden()
    page.click("#menu")
    expect(page.locator("#conversations .open")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.click("#menu")
    page.click("#open-settings")
    page.click("#close-settings")
    # opening the settings closes the list
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.locator("#menu")).to_be_focused()
    context.close()


def test_controls_have_accessible_names(page):
    ask(page, "thought")
    nameless = "all => all.filter(one => !(one.ariaLabel || one.labels?.length || one.textContent.trim())).map(one => one.id)"
    assert page.locator("button, input, textarea").evaluate_all(nameless) == []
    assert page.locator("#status").get_attribute("aria-live") == "polite"


def test_page_works_with_the_real_server(browser):
    link = FakeLink("<think>hm</think>**Hi** there")
    with serving(make_app(Service(link), Access(keys=("right",)))) as url:
        page = browser.new_page()
        page.goto(url)
        page.fill("#key-field", "right")
        page.click("#key-accept")
        expect(page.locator("#server-text")).to_have_text("toy/model")
        ask(page, "hello")
        expect(page.locator(".reply strong")).to_have_text("Hi")
        assert "prompt tokens cached" in page.locator(".reply dl").inner_text()
        page.close()
    assert "hello" in link.prompt
