"""From OpenAI's requests to what the model is asked."""

from typing import Any

from pydantic_core import from_json

from auraflux.errors import InputError
from auraflux.run.sampling import Sampling
from auraflux.serve.ask import Ask, Format, Named
from auraflux.serve.conversation import Message as Turn
from auraflux.serve.conversation import without_billing
from auraflux.serve.limits import Limits, at_most
from auraflux.serve.schema import (
    Call,
    ChatRequest,
    Grammar,
    Message,
    ResponseFormat,
    SamplingFields,
    TokenizeRequest,
    Tool,
    ToolChoice,
)

ROLES = {"developer": "system", "function": "tool"}
# templates know three levels
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
TEXTS = ("text", "input_text", "output_text")


def to_ask(request: ChatRequest, limits: Limits, user: str) -> Ask:
    """Turn a request for a chat into what the model is asked."""
    tools = [_tool(tool) for tool in request.tools or ()]
    wanted = request.max_completion_tokens or request.max_tokens
    told = (request.top_logprobs or 0) if request.logprobs else None
    if told is None and request.top_logprobs is not None:
        raise InputError("top_logprobs is only told with logprobs: true.")
    return Ask(
        messages=_turns(request.messages, limits),
        sampling=to_sampling(request, max_tokens=wanted, logprobs=told),
        tools=tools,
        tool_choice=_choice(request.tool_choice, [tool["function"]["name"] for tool in tools]),
        parallel=request.parallel_tool_calls is not False,
        format=to_format(request.response_format, request.grammar),
        count=request.n or 1,
        values=_values(request),
        user=user,
    )


def to_ask_tokens(request: TokenizeRequest, limits: Limits) -> Ask:
    """Turn a conversation whose tokens are wanted into what a model would be asked."""
    messages = _turns(request.messages or [], limits)
    return Ask(messages, tools=[_tool(tool) for tool in request.tools or ()], values=request.chat_template_kwargs or {})


def to_sampling(request: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """Take what is given and OpenAI's defaults for the rest."""
    given: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": request.top_p,
        # some clients write -1 for all
        "top_k": None if request.top_k is None else max(request.top_k, 0),
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": None if request.seed is None else request.seed % (1 << 63),
        "max_tokens": max_tokens,
        "stop": (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        "endless": bool(request.ignore_eos),
        "logprobs": logprobs,
        "logit_bias": _bias(request.logit_bias or {}),
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def to_format(response: ResponseFormat | None, grammar: Grammar | str | None) -> Format | None:
    """Give what an answer must be; only one of the two ways to say it may be used."""
    wanted = response is not None and response.type != "text"
    if grammar is not None and wanted:
        raise InputError("Give either response_format or grammar, not both.")
    if isinstance(grammar, str):
        return Format("lark", grammar)
    if grammar is not None:
        return Format("schema", _schema(grammar.value)) if grammar.type == "json_schema" else _text_grammar(grammar)
    if response is None or not wanted:
        return None
    if response.type == "json_object":
        return Format("json")
    if response.json_schema is None or response.json_schema.schema_ is None:
        raise InputError("response_format of type json_schema needs json_schema.schema.")
    return Format("schema", response.json_schema.schema_)


def _text_grammar(grammar: Grammar) -> Format:
    if not isinstance(grammar.value, str):
        raise InputError(f"A grammar of type {grammar.type} is a text.")
    return Format(grammar.type, grammar.value)


def _schema(value: str | dict[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError as err:
        raise InputError("The grammar of type json_schema is not JSON.") from err


def _turns(messages: list[Message], limits: Limits) -> list[Turn]:
    """Give the messages to a template; some templates want the name of the tool that a result is of."""
    turns = [_turn(message, number, limits) for number, message in enumerate(messages)]
    names: dict[str, str] = {}
    for number, turn in enumerate(turns):
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
        called = turn.get("tool_call_id") if turn["role"] == "tool" else None
        if called is None:
            continue
        if called not in names:
            raise InputError(f"messages.{number} answers tool call {called[:80]!r}, and no message before it has that call.")
        turn.setdefault("name", names[called])
    return turns


def _turn(message: Message, number: int, limits: Limits) -> Turn:
    role = ROLES.get(message.role, message.role)
    text = _text(message, number, limits)
    turn: Turn = {"role": role, "content": without_billing(text) if role == "system" else text}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    thought = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name), ("reasoning_content", thought)):
        if value is not None:
            turn[key] = value
    return turn


def _text(message: Message, number: int, limits: Limits) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    at_most(f"the parts of messages.{number}", len(message.content), limits.parts)
    texts = []
    for part in message.content:
        if part.type not in TEXTS and part.type != "refusal":
            raise InputError(f"messages.{number} has a part of type {part.type!r}; this model reads text only.")
        texts.append((part.refusal if part.type == "refusal" else part.text) or "")
    return "\n".join(texts)


def _call(call: Call) -> dict[str, Any]:
    """Templates want arguments as an object; those that are none stay text."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": call.function.name, "arguments": {} if arguments in (None, "") else arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    about: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    about["parameters"] = function.parameters or {}
    if function.strict:
        about["strict"] = True
    return {"type": "function", "function": about}


def _choice(choice: str | ToolChoice | None, names: list[str]) -> str | Named:
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if not names:
        raise InputError("tool_choice asks for a call, but there are no tools.")
    if isinstance(choice, str):
        return choice
    if choice.function.name not in names:
        raise InputError(f"tool_choice names {choice.function.name!r}, which is none of the tools: {', '.join(names)}.")
    return Named(choice.function.name)


def _bias(given: dict[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 12)), None)
    if wrong is not None:
        raise InputError(f"logit_bias has the key {wrong[:40]!r}, which is not the number of a token.")
    return {int(key): value for key, value in given.items()}


def _values(request: ChatRequest) -> dict[str, Any]:
    effort = request.reasoning_effort
    if effort is None:
        given: dict[str, Any] = {}
    # no template knows the word; those that can leave thinking out have a switch for it
    elif effort == "none":
        given = {"enable_thinking": False}
    else:
        given = {"reasoning_effort": EFFORTS.get(effort, effort)}
    return {**given, **(request.chat_template_kwargs or {})}
