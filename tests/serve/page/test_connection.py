"""The state of the server and the API key, in a real browser."""

import pytest

from tests.serve.page.conftest import Site, ask

expect = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed").expect
pytestmark = pytest.mark.slow

# the server is asked every 0.7 seconds; a busy machine takes longer
WITHIN_MS = 10_000


def test_dot_follows_the_server(browser):
    site = Site().start()
    page = browser.new_page()
    page.goto(site.url)
    dot = page.locator("#server")
    expect(dot).to_have_attribute("data-state", "ready")
    site.stop()
    expect(dot).to_have_attribute("data-state", "away", timeout=WITHIN_MS)
    expect(page.locator("#server-text")).to_have_text("The server does not answer")
    site = Site(site.port).start()
    expect(dot).to_have_attribute("data-state", "ready", timeout=WITHIN_MS)
    site.app.state.loading = 1
    expect(dot).to_have_attribute("data-state", "loading", timeout=WITHIN_MS)
    site.app.state.loading = 0
    expect(dot).to_have_attribute("data-state", "ready", timeout=WITHIN_MS)
    page.close()
    site.stop()


def test_api_key_is_requested_and_saved(page, site):
    site.app.state.key = "right"
    page.reload()
    expect(page.get_by_text("This server asks for an API key")).to_be_visible()
    expect(page.locator("#server")).to_have_attribute("data-state", "locked")
    for wrong in ("wrong", "wrong"):
        page.fill("#key-field", wrong)
        page.keyboard.press("Enter")
        expect(page.locator("#key-title")).to_have_text("The key was not accepted")
    expect(page.locator("#key-message")).to_contain_text("Is a character missing")
    expect(page.locator("#key-field")).to_have_value("wrong")
    page.fill("#key-field", "right")
    page.click("#key-accept")
    expect(page.locator("#server")).to_have_attribute("data-state", "ready")
    page.reload()
    expect(page.locator("#server")).to_have_attribute("data-state", "ready")
    assert page.locator("#key-dialog").is_hidden()


def test_dialog_for_the_key_opens_once_and_on_demand(page, site):
    site.app.state.key = "right"
    page.reload()
    page.click("#key-cancel")
    page.wait_for_timeout(2500)
    assert page.locator("#key-dialog").is_hidden()
    page.click("#server")
    page.fill("#key-field", "not a key")
    page.keyboard.press("Enter")
    expect(page.locator("#key-message")).to_contain_text("no spaces")
    page.fill("#key-field", "right")
    page.keyboard.press("Enter")
    expect(page.locator("#server")).to_have_attribute("data-state", "ready")


def test_key_that_is_changed_on_the_server_is_asked_for_again(page, site):
    ask(page, "hello")
    site.app.state.key = "right"
    ask(page, "again", finished=False)
    page.fill("#key-field", "right")
    page.keyboard.press("Enter")
    expect(page.locator(".reply").nth(1).locator(".level-2").first).to_be_visible()
