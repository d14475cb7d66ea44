"""`parse_form`: the fields and the file of a multipart/form-data body."""

import re
from dataclasses import dataclass, field

from auraflux.serve.failures import Failure

BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
NAME = re.compile(rb'[;\s]name="([^"]*)"')
FILENAME = re.compile(rb'[;\s]filename="((?:[^"\\]|\\.)*)"')
MOST_PARTS = 32


@dataclass
class Form:
    """A form.

    fields    values by name
    filename  of the file
    content   of the file; None if there is none
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    content: bytes | None = None


def parse_form(content_type: str, body: bytes) -> Form:
    """Return the fields of a form and the part that is named file."""
    found = BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise Failure(400, "The body must be multipart/form-data, with the fields file and purpose.", code="invalid_form")
    mark = b"--" + (found[1] or found[2]).encode()
    # the first boundary needs no line break before it
    parts = (b"\r\n" + body).split(b"\r\n" + mark)[1:]
    if len(parts) < 2 or not parts[-1].startswith(b"--") or len(parts) > MOST_PARTS:
        raise Failure(400, "The form is cut short, or has too many parts.", code="invalid_form")
    form = Form()
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        name = NAME.search(head)
        if not separator or name is None:
            raise Failure(400, "A part of the form has no name.", code="invalid_form")
        if name[1] == b"file":
            file = FILENAME.search(head)
            form.content, form.filename = content, _text(file[1])[:255] if file else "file"
        else:
            form.fields[_text(name[1])[:100]] = _text(content)
    return form


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
