"""What a model's text says: reasoning, content and calls, read from the syntax its family writes, one file for each."""

from auraflux.serve.parse.find import find_syntax
from auraflux.serve.parse.syntax import Parser, Syntax

__all__ = ["Parser", "Syntax", "find_syntax"]
