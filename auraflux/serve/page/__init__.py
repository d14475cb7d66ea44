"""Serve the chat page: static files that call the API of the same server.

All files are read once from this package. A request looks its name up in a table, so no client input becomes a path. Text is
sent compressed to clients that take gzip.
"""

import gzip
import mimetypes
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# trusted types make the browser itself refuse innerHTML and similar sinks, so a bug in a script cannot turn text into markup
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}

# some systems map .js to text/plain, and browsers refuse to run that
CONTENT_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class Asset:
    """A file of the page with its content type and ETag."""

    def __init__(self, name: str, content: bytes) -> None:
        suffix = name[name.rfind(".") :]
        self.content = content
        self.content_type = CONTENT_TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        # fonts are compressed already
        self.compressible = suffix != ".woff2"
        self.digest = sha256(content).hexdigest()[:32]

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)

    def respond(self, request: Request) -> Response:
        """Send the file, or 304 if the browser's copy is current."""
        zipped = self.compressible and _takes_gzip(request.headers.get("accept-encoding", ""))
        # each encoding has an ETag of its own
        etag = f'"{self.digest}-gzip"' if zipped else f'"{self.digest}"'
        headers = {**HEADERS, "ETag": etag}
        cached = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if etag in cached:
            return Response(status_code=304, headers=headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return Response(self.compressed if zipped else self.content, media_type=self.content_type, headers=headers)


def _takes_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header names gzip, other than to refuse it."""
    for each in accepted.lower().split(","):
        name, _, quality = each.replace(" ", "").partition(";q=")
        if name == "gzip":
            return quality.strip("0.") != "" or not quality
    return False


def routes() -> list[Route]:
    """Return the routes of the page: `/`, and its files below `/static`."""
    assets = _read_assets(files(__package__) / "static")

    async def index(request: Request) -> Response:
        return assets["index.html"].respond(request)

    async def static(request: Request) -> Response:
        asset = assets.get(request.path_params["path"])
        if asset is None:
            return Response("There is no such file.\n", status_code=404, media_type="text/plain", headers=HEADERS)
        return asset.respond(request)

    return [Route("/", index, include_in_schema=False), Route("/static/{path:path}", static, include_in_schema=False)]


def _read_assets(folder: Traversable, prefix: str = "") -> dict[str, Asset]:
    """Read the files of a folder and its subfolders, by their path below it."""
    assets: dict[str, Asset] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            assets |= _read_assets(entry, f"{prefix}{entry.name}/")
        else:
            assets[prefix + entry.name] = Asset(entry.name, entry.read_bytes())
    return assets
