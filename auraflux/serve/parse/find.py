"""Which syntax a model writes: what its chat template writes says most, its family the rest."""

from dataclasses import replace

from auraflux.serve.parse.coder import CODER
from auraflux.serve.parse.deepseek import CALLS, DEEPSEEK, DEEPSEEK_V31
from auraflux.serve.parse.gemma import GEMMA
from auraflux.serve.parse.glm import GLM, KEY
from auraflux.serve.parse.harmony import CHANNEL, HARMONY
from auraflux.serve.parse.hermes import HERMES
from auraflux.serve.parse.kimi import CALLS as KIMI_CALLS
from auraflux.serve.parse.kimi import KIMI
from auraflux.serve.parse.llama import LLAMA, PYTHON
from auraflux.serve.parse.minimax import MINIMAX
from auraflux.serve.parse.minimax import OPEN as MINIMAX_OPEN
from auraflux.serve.parse.mistral import ARGS, MISTRAL, MISTRAL_ARGS
from auraflux.serve.parse.plain import FENCE, read
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.tagged import FUNCTION, OPEN

PLAIN = Syntax("plain", read, form=Form(between="; "))
# texts that all stand in a template; the first row that fits is taken
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
# beginnings of model types, longer ones before shorter
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
    """Find the syntax of a model by its chat template's source, or else by its family."""
    source = template or ""
    found = next((syntax for texts, syntax in BY_TEMPLATE if all(each in source for each in texts)), None)
    if found is None:
        found = next((syntax for family, syntax in BY_FAMILY if model_type.startswith(family)), PLAIN)
    thinks = not template or any(mark in source for each in found.think for mark in each)
    return replace(found, thinks=bool(found.think) and thinks)
