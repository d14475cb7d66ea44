"""Selection of a model's syntax: by its chat template, else by its model type."""

from dataclasses import replace

from auraflux.serve.parse.argument_tags import FUNCTION, OPEN
from auraflux.serve.parse.families.deepseek import CALLS, DEEPSEEK, DEEPSEEK_V31
from auraflux.serve.parse.families.gemma import GEMMA
from auraflux.serve.parse.families.glm import GLM, KEY
from auraflux.serve.parse.families.harmony import CHANNEL, HARMONY
from auraflux.serve.parse.families.hermes import HERMES
from auraflux.serve.parse.families.kimi import CALLS as KIMI_CALLS
from auraflux.serve.parse.families.kimi import KIMI
from auraflux.serve.parse.families.llama import LLAMA, PYTHON
from auraflux.serve.parse.families.minimax import MINIMAX
from auraflux.serve.parse.families.minimax import OPEN as MINIMAX_OPEN
from auraflux.serve.parse.families.mistral import ARGS, MISTRAL, MISTRAL_ARGS
from auraflux.serve.parse.families.qwen3_coder import CODER
from auraflux.serve.parse.plain import FENCE, parse
from auraflux.serve.parse.syntax import CallTemplate, Syntax

PLAIN = Syntax("plain", parse, call_template=CallTemplate(between="; "))
# strings that must all occur in a template; the first matching row wins
BY_TEMPLATE: list[tuple[tuple[str, ...], Syntax]] = [
    ((CHANNEL,), HARMONY),
    ((CALLS, f"{FENCE}json"), DEEPSEEK),
    ((CALLS,), DEEPSEEK_V31),
    (("[TOOL_CALLS]", ARGS), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    ((MINIMAX_OPEN,), MINIMAX),
    ((KIMI_CALLS,), KIMI),
    ((OPEN, KEY), GLM),
    ((OPEN, FUNCTION), CODER),
    ((OPEN,), HERMES),
    ((PYTHON,), LLAMA),
    (("<|start_header_id|>",), LLAMA),
    (("<start_of_turn>",), GEMMA),
]
# prefixes of model types, longer before shorter
BY_FAMILY: list[tuple[str, Syntax]] = [
    ("gpt_oss", HARMONY),
    ("deepseek", DEEPSEEK),
    ("kimi", KIMI),
    ("minimax", MINIMAX),
    ("glm", GLM),
    ("ministral", MISTRAL_ARGS),
    ("mistral", MISTRAL),
    ("mixtral", MISTRAL),
    ("qwen3_5", CODER),
    ("qwen3_next", CODER),
    ("qwen", HERMES),
    ("gemma", GEMMA),
    ("llama", LLAMA),
]


def find_syntax(model_type: str, template: str | None) -> Syntax:
    """Return the syntax for a chat template's source, else for a model type."""
    source = template or ""
    found = next((syntax for strings, syntax in BY_TEMPLATE if all(each in source for each in strings)), None)
    if found is None:
        found = next((syntax for family, syntax in BY_FAMILY if model_type.startswith(family)), PLAIN)
    may_think = not template or any(tag in source for pair in found.think_tags for tag in pair)
    return replace(found, may_think=bool(found.think_tags) and may_think)
