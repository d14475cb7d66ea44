"""Conversion of OpenAI's requests to conversations and sampling settings."""

from typing import Any

from pydantic_core import from_json

from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import InputError
from auraflux.serve.chat.conversation import Conversation, Format, NamedTool, without_billing
from auraflux.serve.chat.conversation import Message as TemplateMessage
from auraflux.serve.chat.images import ImageSource, content_of
from auraflux.serve.limits import Limits, at_most
from auraflux.serve.openai.schema import (
    Call,
    ChatCompletionRequest,
    ContentPart,
    Grammar,
    ImageUrl,
    Message,
    ResponseFormat,
    SamplingFields,
    TokenizeRequest,
    Tool,
    ToolChoice,
)

ROLES = {"developer": "system", "function": "tool"}
# templates have three levels
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
IMAGE_PARTS, IMAGE_ROLES = ("image_url", "input_image"), ("user", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")


def to_conversation(request: ChatCompletionRequest, limits: Limits, user: str, defaults: DefaultSampling) -> Conversation:
    """Convert a chat completion request."""
    tools = [_tool(tool) for tool in request.tools or ()]
    max_tokens = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    if logprobs is None and request.top_logprobs is not None:
        raise InputError("top_logprobs requires logprobs: true.")
    return Conversation(
        messages=_messages(request.messages, limits),
        sampling=to_sampling(request, defaults, max_tokens=max_tokens, logprobs=logprobs),
        tools=tools,
        tool_choice=_choice(request.tool_choice, [tool["function"]["name"] for tool in tools]),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        format=to_format(request.response_format, request.grammar),
        count=request.n or 1,
        template_kwargs=_template_kwargs(request),
        thinking_budget=_thinking_budget(request),
        user=user,
        continue_final_message=bool(request.continue_final_message),
    )


def tokenize_request_to_conversation(request: TokenizeRequest, limits: Limits) -> Conversation:
    """Convert the conversation of a tokenize request."""
    messages, tools = _messages(request.messages or [], limits), [_tool(tool) for tool in request.tools or ()]
    return Conversation(messages, tools=tools, template_kwargs=request.chat_template_kwargs or {})


def to_sampling(
    request: SamplingFields, defaults: DefaultSampling, *, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """Return the sampling settings, with the model's defaults for missing fields."""
    return defaults.sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        # some clients send -1 for no limit
        top_k=None if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=None if request.seed is None else request.seed % (1 << 63),
        max_tokens=max_tokens,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        logit_bias=_bias(request.logit_bias or {}),
    )


def to_format(response: ResponseFormat | None, grammar: Grammar | str | None) -> Format | None:
    """Return the output constraint; refuse response_format together with grammar."""
    constrained = response is not None and response.type != "text"
    if grammar is not None and constrained:
        raise InputError("Give either response_format or grammar, not both.")
    if isinstance(grammar, str):
        return Format("lark", grammar)
    if grammar is not None:
        return Format("schema", _schema(grammar.value)) if grammar.type == "json_schema" else _text_grammar(grammar)
    if response is None or not constrained:
        return None
    if response.type == "json_object":
        return Format("json")
    if response.json_schema is None or response.json_schema.schema_ is None:
        raise InputError("response_format of type json_schema needs json_schema.schema.")
    return Format("schema", response.json_schema.schema_)


def _text_grammar(grammar: Grammar) -> Format:
    if not isinstance(grammar.value, str):
        raise InputError(f"The value of a grammar of type {grammar.type} must be a string.")
    return Format(grammar.type, grammar.value)


def _schema(value: str | dict[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError as err:
        raise InputError("The grammar of type json_schema is not JSON.") from err


def _messages(messages: list[Message], limits: Limits) -> list[TemplateMessage]:
    """Return the messages for a template; add the tool's name to results, which some templates need."""
    converted = [_message(message, number, limits) for number, message in enumerate(messages)]
    names: dict[str, str] = {}
    for number, message in enumerate(converted):
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        call_id = message.get("tool_call_id") if message["role"] == "tool" else None
        if call_id is None:
            continue
        if call_id not in names:
            raise InputError(
                f"messages.{number} is the result of tool call {call_id[:80]!r}, but no earlier message has that call."
            )
        message.setdefault("name", names[call_id])
    return converted


def _message(message: Message, number: int, limits: Limits) -> TemplateMessage:
    role = ROLES.get(message.role, message.role)
    content = _content(message, number, limits)
    if role == "system" and isinstance(content, str):
        content = without_billing(content)
    converted: TemplateMessage = {"role": role, "content": content}
    if message.tool_calls:
        converted["tool_calls"] = [_call(call) for call in message.tool_calls]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name), ("reasoning_content", reasoning)):
        if value is not None:
            converted[key] = value
    return converted


def _content(message: Message, number: int, limits: Limits) -> str | list[dict[str, Any]]:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    at_most(f"the parts of messages.{number}", len(message.content), limits.parts)
    return content_of([_part(part, message.role, f"messages.{number}.content.{at}") for at, part in enumerate(message.content)])


def _part(part: ContentPart, role: str, where: str) -> str | ImageSource:
    if part.type in IMAGE_PARTS and role in IMAGE_ROLES:
        return ImageSource.of_url(part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url, where)
    if part.type not in TEXT_PARTS and part.type != "refusal":
        raise InputError(
            f"{where} is of type {part.type!r} in a message of the {role}; text and images of users are supported."
        )
    return (part.refusal if part.type == "refusal" else part.text) or ""


def _call(call: Call) -> dict[str, Any]:
    """Return a call for a template: arguments as an object, or as text if they are not JSON."""
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
    described: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    described["parameters"] = function.parameters or {}
    if function.strict:
        described["strict"] = True
    return {"type": "function", "function": described}


def _choice(choice: str | ToolChoice | None, names: list[str]) -> str | NamedTool:
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if not names:
        raise InputError("tool_choice requires a call, but there are no tools.")
    if isinstance(choice, str):
        return choice
    if choice.function.name not in names:
        raise InputError(f"tool_choice names {choice.function.name!r}, which is not one of the tools: {', '.join(names)}.")
    return NamedTool(choice.function.name)


def _bias(given: dict[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 12)), None)
    if wrong is not None:
        raise InputError(f"logit_bias has the key {wrong[:40]!r}, which is not a token id.")
    return {int(key): value for key, value in given.items()}


def _thinking_budget(request: ChatCompletionRequest) -> int | None:
    if request.max_thinking_tokens is not None or request.thinking is None:
        return request.max_thinking_tokens
    return request.thinking.budget_tokens


def _template_kwargs(request: ChatCompletionRequest) -> dict[str, Any]:
    effort = request.reasoning_effort
    if effort is None:
        kwargs: dict[str, Any] = {}
    # templates have no effort "none"; those with optional reasoning have a switch
    elif effort == "none":
        kwargs = {"enable_thinking": False}
    else:
        kwargs = {"reasoning_effort": EFFORTS.get(effort, effort)}
    if request.thinking is not None:
        kwargs["enable_thinking"] = request.thinking.type != "disabled"
    return {**kwargs, **(request.chat_template_kwargs or {})}
