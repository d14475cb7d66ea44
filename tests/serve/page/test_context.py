"""Files, the context meter, continued answers and the address, in a real browser."""

from base64 import b64decode, b64encode

import pytest

from tests.serve.page.conftest import ask
from tests.serve.page.pdf_file import pdf
from tests.serve.page_stub import ANSWER, MATHS

expect = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed").expect
pytestmark = pytest.mark.slow


def upload(name: str, content: bytes) -> dict:
    return {"name": name, "mimeType": "", "buffer": content}


def test_answer_at_the_token_limit_is_continued(page, site):
    ask(page, "limit")
    reply = page.locator(".reply")
    expect(reply.locator(".problem span")).to_have_text("Stopped at the token limit.")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(reply.locator("a")).to_have_text("the paper")
    expect(reply.locator(".problem")).to_be_hidden()
    received = site.received[1]
    assert received["continue_final_message"] is True
    assert received["messages"][-1] == {"role": "assistant", "content": ANSWER[:150]}
    # the tokens of both parts
    expect(reply.locator("dd").nth(2)).to_have_text("636 tokens")
    ask(page, "limit again")
    assert site.received[2]["messages"][1]["content"] == ANSWER
    page.reload()
    expect(page.get_by_role("button", name="Continue", exact=True)).to_have_count(1)


def test_full_context_cannot_be_continued(page):
    ask(page, "full")
    expect(page.locator(".reply .problem")).to_contain_text("context is full")
    expect(page.locator("#meter")).to_have_attribute("data-level", "high")
    assert page.get_by_role("button", name="Continue", exact=True).count() == 0


def test_stopped_answer_can_be_continued(page, site):
    ask(page, "slow thought", finished=False)
    expect(page.locator(".reply .prose")).to_contain_text("A cache")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(page.locator(".reply .prose h3").first).to_have_text("What is stored")
    page.keyboard.press("Escape")
    begun = site.received[1]["messages"][-1]
    assert ANSWER.startswith(begun["content"])
    assert begun["reasoning_content"]


def test_files_are_sent_with_the_message(page, site):
    page.set_input_files("#attach-file", [upload("notes.md", b"# Notes\r\n```\ncode\n```"), upload("umlaut.csv", b"a;\xfc\n")])
    expect(page.locator("#attachments .chip-name")).to_have_text(["notes.md", "umlaut.csv"])
    expect(page.locator("#meter-text")).to_have_text("6 of 131,072 tokens")
    page.set_input_files("#attach-file", upload("third.txt", b"x"))
    page.get_by_label("Remove third.txt").click()
    ask(page, "what is this?")
    assert site.received[0]["messages"][0]["content"] == (
        "File notes.md:\n\n````md\n# Notes\n```\ncode\n```\n````\n\nFile umlaut.csv:\n\n```csv\na;ü\n```\n\nwhat is this?"
    )
    expect(page.locator("#attachments")).to_be_hidden()
    expect(page.locator("#meter-text")).to_have_text("1,342 of 131,072 tokens")
    page.reload()
    page.locator(".question summary").first.click()
    expect(page.locator(".question pre")).to_have_text("# Notes\n```\ncode\n```")
    # an edited question keeps its files
    page.locator("#question").press("ArrowUp")
    page.get_by_label("Edit your message").fill("and now?")
    page.keyboard.press("Enter")
    expect(page.locator(".question .bubble")).to_have_text("and now?")
    page.wait_for_selector("#send[aria-label^=Send]")
    assert site.received[1]["messages"][0]["content"].endswith("a;ü\n```\n\nand now?")


LOCK = f"/Filter /Standard /V 1 /R 2 /O <{'00' * 32}> /U <{'00' * 32}> /P -4"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("photo.png", bytes(range(256)), "photo.png is a picture, and this model reads text only."),
        ("paper.pdf", b"%PDF-1.7 text", "paper.pdf is damaged, or no PDF."),
        (
            "scan.pdf",
            pdf([""]),
            "scan.pdf holds no text, perhaps only pictures of its pages. Add a picture, or copy its text into the message.",
        ),
        ("secret.pdf", pdf(["secret"], LOCK), "secret.pdf is protected by a password."),
        ("long.pdf", pdf(["word " * 4000] * 60), "The text of long.pdf has 1.2 MB; a file may have at most 1.0 MB."),
        (
            "paper.docx",
            b"PK\x03\x04\0",
            "paper.docx is a Word document. Save it as plain text, or copy its text into the message.",
        ),
        ("big.log", b"x" * 1_200_000, "big.log has 1.2 MB; a file may have at most 1.0 MB."),
        ("empty.txt", b"", "empty.txt is empty or a folder."),
    ],
)
def test_files_that_are_no_text_are_refused(page, name, content, problem):
    page.set_input_files("#attach-file", upload(name, content))
    expect(page.locator("#note")).to_have_text(problem)
    expect(page.locator("#attachments")).to_be_hidden()


def test_the_text_of_a_pdf_is_sent(page, site):
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.set_input_files("#attach-file", upload("paper.pdf", pdf(["The harbour of Ålesund", "", "shipped 4,217 crates"])))
    expect(page.locator("#attachments .chip-name")).to_have_text("paper.pdf")
    expect(page.locator("#attachments small")).to_have_text("11 tokens")
    ask(page, "how many?")
    text = "The harbour of Ålesund\n\nshipped 4,217 crates"
    assert site.received[0]["messages"][0]["content"] == f"File paper.pdf:\n\n```\n{text}\n```\n\nhow many?"
    # the library comes with the first PDF only
    page.reload()
    page.set_input_files("#attach-file", upload("notes.txt", b"a note"))
    assert sum("pdf.worker" in url for url in requested) == 1


PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


def picture(name: str) -> dict:
    return {"name": name, "mimeType": "image/png", "buffer": PIXEL}


def test_pictures_are_sent_to_a_model_that_takes_them(page, site):
    page.set_input_files("#attach-file", picture("dot.png"))
    expect(page.locator("#note")).to_have_text("dot.png is a picture, and this model reads text only.")
    site.app.state.modalities = ["text", "image"]
    page.reload()
    page.wait_for_selector("#send")
    page.set_input_files("#attach-file", [picture("dot.png"), upload("notes.txt", b"a note")])
    expect(page.locator("#attachments img")).to_have_count(1)
    ask(page, "what is this?")
    url = "data:image/png;base64," + b64encode(PIXEL).decode()
    text = "File notes.txt:\n\n```txt\na note\n```\n\nwhat is this?"
    assert site.received[0]["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": text},
    ]
    page.reload()
    expect(page.locator(".question img.picture")).to_have_attribute("alt", "dot.png")


DROP = """() => {
  const data = new DataTransfer();
  data.items.add(new File(["dropped text"], "dropped.txt"));
  for (const type of ["dragover", "drop"]) dispatchEvent(new DragEvent(type, { dataTransfer: data, cancelable: true }));
}"""


def test_file_can_be_dropped_and_sent_alone(page, site):
    page.evaluate(DROP)
    expect(page.locator("#attachments .chip-name")).to_have_text("dropped.txt")
    assert page.locator("#drop").is_hidden()
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("dropped.txt")
    page.wait_for_selector("#send[aria-label^=Send]")
    assert site.received[0]["messages"][0]["content"] == "File dropped.txt:\n\n```txt\ndropped text\n```"


PASTE = """([encoded, name]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type: "image/png" }));
  const pasted = new ClipboardEvent("paste", { clipboardData: data, cancelable: true });
  document.querySelector("#question").dispatchEvent(pasted);
}"""


def test_a_picture_can_be_pasted(page, site):
    site.app.state.modalities = ["text", "image"]
    page.reload()
    page.wait_for_selector("#send")
    page.evaluate(PASTE, [b64encode(PIXEL).decode(), "pasted.png"])
    expect(page.locator("#attachments img")).to_have_count(1)
    ask(page, "what is this?")
    sent = site.received[0]["messages"][0]["content"]
    assert sent[0] == {"type": "image_url", "image_url": {"url": "data:image/png;base64," + b64encode(PIXEL).decode()}}


def test_reload_and_back_return_to_the_conversation(page):
    ask(page, "first")
    page.click("#new")
    ask(page, "second")
    page.reload()
    expect(page.locator(".question .bubble")).to_have_text("second")
    page.go_back()
    expect(page.locator(".question .bubble")).to_have_text("first")
    page.reload()
    expect(page.locator(".question .bubble")).to_have_text("first")
    page.click("#new")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_maths_is_shown_as_formulas(page):
    ask(page, "maths")
    reply = page.locator(".reply .prose")
    expect(reply.locator("math")).to_have_count(4)
    expect(reply.locator("math msqrt")).to_have_count(2)
    text = reply.inner_text()
    assert "A coffee for $3 and a cake for $5 stay money" in text
    # what is not TeX stays as it was written
    assert r"\nosuch{x}" in text
    assert MATHS.count(r"\frac") == reply.locator("math mfrac").count()
    # the font has come from this server
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px \"Page Math\"'))")
