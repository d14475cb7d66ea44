"""The chat page over HTTP: its headers, and what its files may and may not contain."""

import posixpath
import re
import tomllib
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import auraflux.serve.page
from tests.serve.page_stub import stub

ROOT = Path(auraflux.serve.page.__file__).parent / "static"
VENDOR = ROOT / "vendor"
FILES = sorted(path for path in ROOT.rglob("*") if path.is_file())
OWN = [path for path in FILES if path.parent != VENDOR]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
HTML = (ROOT / "index.html").read_text()
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def client():
    with TestClient(stub()) as client:
        yield client


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/static/{name_of(file)}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_file_is_served_whole_with_its_type(client, file):
    response = client.get(path_of(file))
    assert response.status_code == 200
    assert response.content == file.read_bytes()
    if file.suffix in TYPES:
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
    assert policy["trusted-types"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("accepted", ["gzip", "br, GZIP;q=0.5, *;q=0", "gzip; q=1.0"])
def test_text_is_compressed_for_clients_that_take_it(client, accepted):
    for file in (ROOT / "app.js", VENDOR / "temml.min.js"):
        response = client.get(path_of(file), headers={"accept-encoding": accepted})
        assert response.headers["content-encoding"] == "gzip"
        assert response.headers["vary"] == "Accept-Encoding"
        assert int(response.headers["content-length"]) < len(file.read_bytes()) / 2
        assert response.content == file.read_bytes()


@pytest.mark.parametrize("accepted", ["", "identity", "gzip;q=0", "gzip;q=0.000, deflate", "xgzip"])
def test_clients_without_gzip_get_the_file_as_stored(client, accepted):
    response = client.get("/static/app.js", headers={"accept-encoding": accepted})
    assert "content-encoding" not in response.headers
    assert int(response.headers["content-length"]) == len((ROOT / "app.js").read_bytes())
    zipped = client.get("/static/app.js", headers={"accept-encoding": "gzip"})
    assert zipped.headers["etag"] != response.headers["etag"]


def test_fonts_are_not_compressed_twice(client):
    assert "content-encoding" not in client.get("/static/vendor/Temml.woff2", headers={"accept-encoding": "gzip"}).headers


def test_a_copy_that_is_still_good_is_not_sent_again(client):
    etag = client.get("/static/app.js").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        response = client.get("/static/app.js", headers={"if-none-match": known})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    assert client.get("/static/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/nothing.js",
        "/static/",
        "/static/../__init__.py",
        "/static/%2e%2e%2f__init__.py",
        "/static/vendor",
        "/static/vendor/../../__init__.py",
        "/static/marked.esm.js",
    ],
)
def test_only_files_of_the_page_are_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("file", SCRIPTS, ids=name_of)
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


@pytest.mark.parametrize("file", OWN, ids=name_of)
def test_files_name_no_other_host(file):
    addresses = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]+", file.read_text())
    assert {address for address in addresses if address != "http://www.w3.org"} == set()


def test_html_holds_no_code_and_no_style():
    assert re.findall(r"<script(?![^>]*\bsrc=)", HTML) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", HTML) == []


def test_every_file_that_is_named_exists_and_every_file_is_named():
    named = set(re.findall(r'(?:src|href)="static/([^"]+)"', HTML)) | {"index.html"}
    for script in SCRIPTS:
        imports = re.findall(r'(?:from |import |import\()"(\.[^"]+)"', script.read_text())
        named |= {resolved(script, path) for path in imports}
    for sheet in (file for file in FILES if file.suffix == ".css"):
        fonts = re.findall(r"""url\(["']([^"':]+)["']\)""", sheet.read_text())
        named |= {resolved(sheet, path) for path in fonts}
    assert named == {name_of(file) for file in FILES if file.suffix in TYPES}


def resolved(file: Path, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name_of(file)), path))


def test_vendored_files_are_those_of_the_table():
    rows = re.findall(r"^\| `([^`]+)` .*, `([^`]+)` \| `(\w+)` \|$", (VENDOR / "README.md").read_text(), re.M)
    assert {name: digest for name, _, digest in rows} == {
        file.name: sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir() if file.suffix in TYPES
    }
    assert {licence for _, licence, _ in rows} == {file.name for file in VENDOR.glob("*.LICENSE")}


def test_vendored_files_keep_their_licence_headers():
    assert "MIT License" in (VENDOR / "marked.esm.js").read_text()[:300]
    assert "@license DOMPurify" in (VENDOR / "purify.min.js").read_text()[:300]


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
        assert any(_matches(f"serve/page/static/{name_of(file)}", pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    """Match as setuptools does: `*` stays within one folder, `**` does not."""
    return fnmatch(path, pattern) if "**" in pattern else path.count("/") == pattern.count("/") and fnmatch(path, pattern)


def test_files_are_short():
    assert {file.name: n for file in OWN if (n := len(file.read_text().splitlines())) > 300} == {}
