"""The chat page as it is served: its headers, and what its files may and may not hold."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import auraflux.serve.page
from tests.serve.page_stub import stub

ROOT = Path(auraflux.serve.page.__file__).parent / "static"
FILES = sorted(ROOT.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
HTML = (ROOT / "index.html").read_text()
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def client():
    with TestClient(stub()) as client:
        yield client


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/static/{file.name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_is_served_whole_with_its_type(client, file):
    response = client.get(path_of(file))
    assert response.status_code == 200
    assert response.content == file.read_bytes()
    assert response.headers["content-type"].partition(";")[0] == TYPES[file.suffix]


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/nothing.js"])
def test_headers_allow_nothing_from_elsewhere(client, path):
    headers = client.get(path).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["font-src"] == "'self'"
    assert policy["img-src"] == "'self' data:"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_a_copy_that_is_still_good_is_not_sent_again(client):
    etag = client.get("/static/app.js").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        response = client.get("/static/app.js", headers={"if-none-match": known})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    assert client.get("/static/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/static/nothing.js", "/static/", "/static/../__init__.py", "/static/%2e%2e%2f__init__.py"])
def test_only_files_of_the_page_are_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_cannot_turn_text_into_markup_or_code(file):
    text = file.read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
        "srcdoc",
    ):
        assert word not in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_name_no_other_host(file):
    addresses = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]+", file.read_text())
    assert {address for address in addresses if address != "http://www.w3.org"} == set()


def test_html_holds_no_code_and_no_style():
    assert re.findall(r"<script(?![^>]*\bsrc=)", HTML) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", HTML) == []


def test_every_file_that_is_named_exists_and_every_file_is_named():
    named = set(re.findall(r'(?:src|href)="static/([^"]+)"', HTML)) | {"index.html"}
    for script in SCRIPTS:
        named |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
    assert named == {file.name for file in FILES}


def test_scripts_use_only_elements_and_icons_that_exist():
    scripts = "\n".join(script.read_text() for script in SCRIPTS)
    ids = set(re.findall(r'\bid="([^"]+)"', HTML))
    assert set(re.findall(r'byId\("([^"]+)"\)', scripts)) <= ids
    icons = set(re.findall(r'icon(?:Button)?\("([^"]+)"', scripts)) | set(re.findall(r'href="#icon-([^"]+)"', HTML))
    assert {f"icon-{name}" for name in icons} <= ids


def test_every_file_is_packaged():
    pyproject = ROOT.parents[3] / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("the package is installed without its sources")
    patterns = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["package-data"]["auraflux"]
    for file in FILES:
        assert any(fnmatch(f"serve/page/static/{file.name}", pattern) for pattern in patterns)


def test_files_are_short():
    assert {file.name: n for file in FILES if (n := len(file.read_text().splitlines())) > 300} == {}
