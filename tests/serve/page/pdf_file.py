"""Small PDF files."""

from collections.abc import Sequence


def pdf(pages: Sequence[str], encryption: str = "") -> bytes:
    """Return a PDF with a line of text on each wide page; `encryption` is the content of an encryption dictionary."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for at, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200000 792] /Resources << /Font << /F1 3 0 R >> >>"
        objects += [f"{page} /Contents {5 + 2 * at} 0 R >>", f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream"]
    content, places = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{each}\nendobj\n".encode("cp1252")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    encrypt = f"/Encrypt << {encryption} >> /ID [<00> <00>]" if encryption else ""
    size = len(objects) + 1
    trailer = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R {encrypt} >>\n"
    return content + f"{trailer}startxref\n{len(content)}\n%%EOF\n".encode()
