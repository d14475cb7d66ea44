"""The chat page: static files that talk to the API of the server they came from.

Everything the browser loads is read once from this package; no name that a client sends becomes a path.
"""

import mimetypes
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# trusted types make the browser itself refuse innerHTML and its kin, so a slip in a script cannot turn text into markup
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
    "X-Content-Type-Options": "nosniff",
}

# named here because the tables of some machines call a script text/plain, which browsers then refuse to run
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Asset:
    """A file of the page with the type and the tag it is served under."""

    def __init__(self, name: str, content: bytes) -> None:
        suffix = name[name.rfind(".") :]
        self.content = content
        self.type = TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.etag = f'"{sha256(content).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        """Send the file, or say that the browser's copy is still good."""
        headers = {**HEADERS, "ETag": self.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.type, headers=headers)


def routes() -> list[Route]:
    """Serve the page at `/` and its files below `/static`."""
    assets = _assets()

    async def index(request: Request) -> Response:
        return assets["index.html"].answer(request)

    async def static(request: Request) -> Response:
        asset = assets.get(request.path_params["name"])
        if asset is None:
            return Response("There is no such file.\n", status_code=404, media_type="text/plain", headers=HEADERS)
        return asset.answer(request)

    return [Route("/", index, include_in_schema=False), Route("/static/{name}", static, include_in_schema=False)]


def _assets() -> dict[str, Asset]:
    folder = files(__package__) / "static"
    return {file.name: Asset(file.name, file.read_bytes()) for file in folder.iterdir() if file.is_file()}
