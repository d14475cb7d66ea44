"""Chat pages in a browser: `python -m bench.lab.chat_pages auraflux=URL llama.cpp=URL open-webui=URL [--axe axe.min.js]`.

Needs the package playwright and a Chromium; the servers run already, with the same model. Every run opens a fresh browser
profile; figures are medians, and pages alternate. Bytes and requests are those until a second after the message field can be
used. "First token" is the time from Enter to the first frame with text of the answer; `--server` asks an API without a page.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, CDPSession, Page, TimeoutError, ViewportSize, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")
WIDE, PHONE = ViewportSize(width=1280, height=800), ViewportSize(width=390, height=844)
SECOND_MS = 1000
STOP = re.compile(r"^Stop( \(Esc\))?$")

TIME_TO_TEXT = """selector => new Promise(resolve => {
  let began = 0;
  addEventListener("keydown", event => { if (event.key === "Enter") began ||= performance.now(); }, true);
  const look = () => {
    const text = [...document.querySelectorAll(selector)].map(one => one.innerText.trim()).join("");
    if (began && text) requestAnimationFrame(() => resolve(performance.now() - began));
    else requestAnimationFrame(look);
  };
  look();
})"""
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
OUTSIDE = """() => [...document.querySelectorAll("button, a, input, textarea, [contenteditable]")].filter(one => {
  const box = one.getBoundingClientRect();
  return one.checkVisibility({ visibilityProperty: true }) && box.width && (box.left < 0 || box.right > innerWidth + 1);
}).length"""


@dataclass(frozen=True)
class Site:
    """Where a page has its parts.

    ready    shown once the page takes messages
    answer   text of an answer
    dismiss  a notice that covers the first visit
    """

    field: str
    ready: str
    answer: str
    dismiss: str | None = None


SITES = {
    "auraflux": Site("#question", "#welcome:not([hidden])", ".reply .prose"),
    "llama.cpp": Site("textarea", "textarea", ".chat-message-assistant .markdown-content"),
    "open-webui": Site("#chat-input", "#chat-input", ".chat-assistant .markdown-prose", "text=Okay, Let's Go!"),
}


class Visit:
    """A fresh browser profile that opened a page."""

    def __init__(self, browser: Browser, url: str, size: ViewportSize):
        self.context = browser.new_context(viewport=size, has_touch=size is PHONE)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.nbytes = 0
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        network: CDPSession = self.context.new_cdp_session(self.page)
        network.send("Network.enable")
        network.on("Network.loadingFinished", self._count)
        self.host = urlsplit(url).netloc
        self.page.goto(url, wait_until="commit")

    def _count(self, event: dict[str, Any]) -> None:
        self.nbytes += int(event["encodedDataLength"])

    @property
    def elsewhere(self) -> list[str]:
        """Requests to other hosts."""
        return [url for url in self.requests if url.startswith("http") and urlsplit(url).netloc != self.host]

    def usable(self, site: Site) -> float:
        """Wait for the message field; return the milliseconds since navigation."""
        visible = "selector => document.querySelector(selector)?.checkVisibility() && performance.now()"
        return float(self.page.wait_for_function(visible, arg=site.ready, polling="raf").json_value())

    def open(self, site: Site) -> None:
        """Wait until the page is quiet, without notices."""
        self.usable(site)
        self.page.wait_for_timeout(SECOND_MS)
        if site.dismiss and self.page.locator(site.dismiss).is_visible():
            self.page.click(site.dismiss)

    def ask(self, site: Site, question: str) -> float:
        """Send a question; return the milliseconds from Enter to the first text, and stop the answer."""
        self.page.click(site.field)
        self.page.keyboard.type(question)
        self.page.evaluate(f"selector => {{ window.firstText = ({TIME_TO_TEXT})(selector) }}", site.answer)
        self.page.keyboard.press("Enter")
        found = float(self.page.evaluate("window.firstText"))
        # a small model may not come to an end
        with contextlib.suppress(TimeoutError):
            self.page.get_by_role("button", name=STOP).last.click(timeout=2 * SECOND_MS)
        return found


def server_alone(url: str, question: str) -> float:
    """Return the milliseconds to the first text of a streamed answer."""
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": question}]}
        began = time.perf_counter()
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    return (time.perf_counter() - began) * 1e3
    raise RuntimeError("no text came")


def first_visit(browser: Browser, site: Site, url: str, question: str) -> dict[str, float]:
    """Open a page with an empty profile and ask a question; return the figures of the visit."""
    visit = Visit(browser, url, WIDE)
    found = {"field usable ms": visit.usable(site)}
    visit.page.wait_for_timeout(SECOND_MS)
    found |= {"bytes": visit.nbytes, "requests": len(visit.requests), "first paint ms": visit.page.evaluate(PAINTED)}
    visit.open(site)
    found["first token ms"] = visit.ask(site, question)
    found |= {"JavaScript errors": len(visit.errors), "requests to other hosts": len(visit.elsewhere)}
    visit.context.close()
    return found


def checks(browser: Browser, site: Site, url: str, axe: str) -> dict[str, Any]:
    """Look at a conversation, and at the page on a phone's screen."""
    found: dict[str, Any] = {}
    for size, label in ((WIDE, "conversation"), (PHONE, "phone")):
        visit = Visit(browser, url, size)
        visit.open(site)
        if size is WIDE:
            visit.ask(site, "Name 2 colours in one short sentence.")
        found[f"{label}: overflow px"] = visit.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        found[f"{label}: controls outside"] = visit.page.evaluate(OUTSIDE)
        found[f"{label}: axe"] = violations(visit.page, axe)
        visit.context.close()
    return found


def violations(page: Page, axe: str) -> list[str]:
    """Return the rules that axe-core finds broken, with the number of elements."""
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(found => found.violations.map(one => [one.id, one.impact, one.nodes.length]))")
    return [f"{rule} ({impact}) x {count}" for rule, impact, count in found]


def medians(visits: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(one[key] for one in visits), 1) for key in (visits[0] if visits else ())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sites", nargs="+", metavar="NAME=URL", help=f"pages: {', '.join(SITES)}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--axe", type=Path, help="check layout and accessibility with axe.min.js of the npm package axe-core")
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="servers to ask without a page")
    given = parser.parse_args(arguments)
    axe = given.axe.read_text() if given.axe else ""
    sites = dict(each.split("=", 1) for each in given.sites)
    visits: dict[str, list[dict[str, float]]] = {name: [] for name in sites}
    alone: dict[str, list[float]] = {url: [] for url in given.server}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        # pages alternate, so that other work on the machine slows all of them
        for run in range(given.runs):
            for name, url in sites.items():
                question = f"Name {run + 3} colours in one short sentence."
                visits[name].append(first_visit(browser, SITES[name], url, question))
            for url, times in alone.items():
                times.append(server_alone(url, f"Name {run + 3} animals in one short sentence."))
        for name, url in sites.items():
            found = medians(visits[name]) | (checks(browser, SITES[name], url, axe) if axe else {})
            print(name, json.dumps(found, indent=2), flush=True)
    for url, times in alone.items():
        print(url, "first token ms", round(statistics.median(times), 1))


if __name__ == "__main__":
    main()
