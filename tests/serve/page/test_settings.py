"""The settings of the page and of a conversation, in a real browser."""

import pytest

from tests.serve.page.conftest import ask

expect = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed").expect
pytestmark = pytest.mark.slow

SAMPLING = {
    "temperature": 0.3,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "max_tokens": 77,
    "max_thinking_tokens": 500,
    "seed": 7,
}


def tune(page, **fields: object) -> None:
    page.click("#open-tuning")
    for name, value in fields.items():
        page.fill(f"#set-{name}", str(value))
    page.keyboard.press("Escape")


def test_settings_of_a_conversation_are_sent_and_saved(page, site):
    tune(page, system="Be brief.", **SAMPLING)
    # before the first message they outlive a reload
    page.reload()
    ask(page, "hello")
    page.reload()
    ask(page, "again")
    for received in site.received:
        assert {name: received[name] for name in SAMPLING} == SAMPLING
        assert received["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click("#new")
    ask(page, "another")
    assert not SAMPLING.keys() & site.received[2].keys()
    assert site.received[2]["messages"] == [{"role": "user", "content": "another"}]


def test_settings_can_be_kept_for_new_conversations_and_reset(page, site):
    page.click("#open-tuning")
    page.fill("#set-temperature", "9")
    page.fill("#set-seed", "3")
    page.click("#tuning-keep")
    # numbers beyond their limits are moved to them
    expect(page.locator("#set-temperature")).to_have_value("2")
    page.keyboard.press("Escape")
    page.click("#new")
    ask(page, "hello")
    assert (site.received[0]["temperature"], site.received[0]["seed"]) == (2, 3)
    page.click("#open-tuning")
    page.click("#tuning-reset")
    page.keyboard.press("Escape")
    ask(page, "again")
    assert not SAMPLING.keys() & site.received[1].keys()


def test_empty_fields_show_the_defaults_of_the_model(page, site):
    expect(page.locator("#server-text")).to_have_text("example-model")
    placeholders = "all => all.map((one) => one.placeholder)"
    numbers = page.locator("#tuning .trio input")
    assert set(numbers.evaluate_all(placeholders)) == {"default", "no limit", "random"}
    site.app.state.defaults = dict.fromkeys(SAMPLING) | {"temperature": 0.6, "top_k": 20, "source": "generation_config.json"}
    page.reload()
    expect(page.locator("#server-text")).to_have_text("example-model")
    assert numbers.evaluate_all(placeholders) == [
        "0.6",
        "off",
        "20",
        "off",
        "off",
        "off",
        "off",
        "no limit",
        "no limit",
        "random",
    ]
    page.click("#open-tuning")
    expect(page.locator("#tuning-source")).to_contain_text("generation_config.json")
    page.keyboard.press("Escape")
    ask(page, "hello")
    assert not SAMPLING.keys() & site.received[0].keys()


def test_theme_and_model_are_shown(page):
    page.click("#open-settings")
    expect(page.locator("#model-kv")).to_have_text("k8v4")
    page.get_by_label("Dark").check()
    page.keyboard.press("Escape")
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_presets(page, site):
    tune(page, system="Be brief.", seed=5)
    page.click("#open-tuning")
    page.select_option("#preset", "Inventive")
    expect(page.locator("#set-temperature")).to_have_value("1.1")
    # built-in presets leave the system prompt and the seed
    page.fill("#set-top_k", "30")
    expect(page.locator("#preset")).to_have_value("")
    page.fill("#preset-name", "Mine")
    page.click("#preset-save")
    expect(page.locator("#preset")).to_have_value("Mine")
    page.fill("#preset-name", "Exact")
    page.click("#preset-save")
    expect(page.locator("#tuning-done")).to_contain_text("built in")
    page.keyboard.press("Escape")
    page.reload()
    page.click("#new")
    page.click("#open-tuning")
    expect(page.locator("#preset")).to_have_value("The model's defaults")
    expect(page.locator("#preset-remove")).to_be_hidden()
    page.select_option("#preset", "Mine")
    page.keyboard.press("Escape")
    ask(page, "hello")
    wanted = {"temperature": 1.1, "min_p": 0.05, "top_k": 30, "seed": 5}
    assert {name: site.received[0].get(name) for name in SAMPLING if name in site.received[0]} == wanted
    assert site.received[0]["messages"][0]["content"] == "Be brief."
    page.click("#open-tuning")
    page.click("#preset-remove")
    assert "Mine" not in page.locator("#preset").inner_text()


def test_the_model_is_chosen_in_the_bar(page, site):
    expect(page.locator("#server-text")).to_have_text("example-model")
    expect(page.locator("#model-choice")).to_be_hidden()
    site.app.state.further = ["second-model"]
    page.reload()
    page.select_option("#model-choice", "second-model")
    ask(page, "hello")
    page.reload()
    expect(page.locator("#model-choice")).to_have_value("second-model")
    ask(page, "again")
    assert [each["model"] for each in site.received] == ["second-model"] * 2


def test_keys(page, site):
    site.app.state.further = ["second-model"]
    page.reload()
    ask(page, "hello")
    focused = "document.activeElement.id"
    for keys, wanted in (("Control+k", "search"), ("Control+/", "question"), ("Control+Shift+M", "model-choice")):
        page.keyboard.press(keys)
        assert page.evaluate(focused) == wanted
    page.keyboard.press("Control+,")
    expect(page.locator("#tuning")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#title")).to_have_text("New conversation")
    # a conversation above, below, and gone
    for question in ("about apples", "about pears"):
        page.keyboard.press("Control+Shift+O")
        ask(page, question)
    title = page.locator("#title")
    for keys, wanted in (
        ("Down", "about apples"),
        ("Down", "hello"),
        ("Down", "hello"),
        ("Up", "about apples"),
        ("Up", "about pears"),
    ):
        page.keyboard.press(f"Control+Shift+Arrow{keys}")
        expect(title).to_have_text(wanted)
    page.fill("#question", "in a text these keys select")
    page.keyboard.press("Control+Shift+ArrowDown")
    page.keyboard.press("Control+Shift+Backspace")
    expect(title).to_have_text("about pears")
    page.fill("#question", "")
    page.keyboard.press("Control+Shift+Backspace")
    expect(page.locator("#conversations .open")).to_have_text(["about apples", "hello"])
    page.get_by_role("button", name="Undo").click()
    expect(title).to_have_text("about pears")
    # Control+k on a phone's width opens the list
    page.set_viewport_size({"width": 400, "height": 800})
    page.keyboard.press("Control+k")
    assert page.evaluate(focused) == "search"
    expect(page.locator("#sidebar")).to_be_visible()
