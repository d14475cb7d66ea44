"""Streaming parsers of generated text: reasoning, content and tool calls, one file per model family's syntax."""

from auraflux.serve.parse.find import find_syntax
from auraflux.serve.parse.syntax import Parser, Syntax

__all__ = ["Parser", "Syntax", "find_syntax"]
