"""Conversion of Anthropic's requests to conversations."""

from collections.abc import Callable
from typing import Any

from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import InputError
from auraflux.serve.anthropic.messages_schema import CountRequest, CustomTool, InputMessage, MessagesRequest, OutputConfig
from auraflux.serve.chat.conversation import Conversation, Format, Message, NamedTool, without_billing
from auraflux.serve.chat.images import ImageSource, content_of, joined

# templates have three levels
EFFORTS = {"xhigh": "high", "max": "high"}


def to_conversation(request: CountRequest, user: str, defaults: DefaultSampling) -> Conversation:
    """Convert a Messages request."""
    tools = [_tool(tool) for tool in request.tools or ()]
    choice = request.tool_choice
    return Conversation(
        messages=to_messages(request),
        sampling=_sampling(request, defaults) if isinstance(request, MessagesRequest) else Sampling(),
        tools=tools,
        tool_choice=_choice(request, [tool["function"]["name"] for tool in tools]),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        format=_format(request),
        template_kwargs=_template_kwargs(request),
        thinking_budget=request.thinking.budget_tokens if request.thinking else None,
        user=user,
    )


def to_messages(request: CountRequest) -> list[Message]:
    """Return the messages: tool results become separate messages, consecutive messages of one role are merged."""
    messages: list[Message] = []
    system = without_billing(_text(request.system or "", "system"))
    if system:
        messages.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for number, source in enumerate(request.messages):
        for message in _CONVERTERS[source.role](source, f"messages.{number}.content", names):
            _append(messages, message)
    if request.messages[-1].role == "assistant":
        raise InputError(
            "The last message is the assistant's, but prefilled answers are not supported. End with a user message."
        )
    return messages


def _append(messages: list[Message], message: Message) -> None:
    role = message["role"]
    last = messages[-1] if messages else {}
    if last.get("role") != role or role not in ("user", "assistant"):
        messages.append(message)
        return
    last["content"] = joined(last["content"], message["content"], "\n" if role == "user" else "")
    if role == "assistant":
        for key, empty in (("tool_calls", []), ("reasoning_content", "")):
            if key in message:
                last[key] = last.get(key, empty) + message[key]


def _user_message(source: InputMessage, where: str, names: dict[str, str]) -> list[Message]:
    blocks = _blocks(source.content, where)
    results = [_result(block, at, names) for block, at in blocks if block["type"] == "tool_result"]
    others = [(block, at) for block, at in blocks if block["type"] != "tool_result"]
    if others or not results:
        results.append({"role": "user", "content": content_of([_part(*each) for each in others])})
    return results


def _assistant_message(source: InputMessage, where: str, names: dict[str, str]) -> list[Message]:
    message: Message = {"role": "assistant", "content": ""}
    for block, at in _blocks(source.content, where):
        kind = block["type"]
        if kind == "text":
            message["content"] += _string(block, "text", at)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _string(block, "thinking", at)
        elif kind == "tool_use":
            call = _call(block, at)
            names[call["id"]] = call["function"]["name"]
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            raise InputError(
                f"{at} is of type {kind!r}, which assistant messages do not support: use text, thinking or tool_use."
            )
    return [message]


def _system_message(source: InputMessage, where: str, names: dict[str, str]) -> list[Message]:
    return [{"role": "system", "content": without_billing(_text(source.content, where))}]


_CONVERTERS: dict[str, Callable[[InputMessage, str, dict[str, str]], list[Message]]] = {
    "user": _user_message,
    "assistant": _assistant_message,
    "system": _system_message,
}


def _call(block: Message, at: str) -> Message:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InputError(f"{at}.input is {_described(given)}; it must be an object.")
    name = _string(block, "name", at)
    return {"id": _string(block, "id", at), "type": "function", "function": {"name": name, "arguments": given}}


def _result(block: Message, at: str, names: dict[str, str]) -> Message:
    call = _string(block, "tool_use_id", at)
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise InputError(f"{at}.content is {_described(content)}; it must be a string or a list of blocks.")
    parts = [_part(*each) for each in _blocks(content or "", f"{at}.content")]
    if call not in names:
        raise InputError(f"{at} is the result of tool_use {call[:80]!r}, but no earlier message has that tool_use.")
    made = content_of(parts)
    if block.get("is_error") is True:
        made = joined("Error: ", made, "")
    return {"role": "tool", "tool_call_id": call, "name": names[call], "content": made}


def _part(block: Message, at: str) -> str | ImageSource:
    """Return a block of a user's message or of a tool's result."""
    if block["type"] != "image":
        return _text_of(block, at)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise InputError(f"{at}.source is of type {kind!r}; base64 and url are supported.")
    if kind == "url":
        return ImageSource.of_url(source.get("url"), at)
    if not str(source.get("media_type", "image/")).startswith("image/"):
        raise InputError(f"{at}.source.media_type is {source['media_type']!r:.80}; it must be an image's.")
    return ImageSource(at, _string(source, "data", f"{at}.source"))


def _blocks(content: str | list[Any], where: str) -> list[tuple[Message, str]]:
    """Return blocks with their paths; a string is one text block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    found = []
    for number, block in enumerate(content):
        at = f"{where}.{number}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InputError(f"{at} is {_described(block)}; it must be an object with a type.")
        found.append((block, at))
    return found


def _text(content: str | list[Any], where: str) -> str:
    return "\n".join(_text_of(block, at) for block, at in _blocks(content, where))


def _text_of(block: Message, at: str) -> str:
    if block["type"] != "text":
        raise InputError(f"{at} is of type {block['type']!r}; text is supported here, and images in messages of users.")
    return _string(block, "text", at)


def _string(block: Message, key: str, at: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InputError(f"{at}.{key} is {_described(value)}; it must be a string.")
    return value


def _described(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _tool(tool: CustomTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InputError(
            f"The tool {tool.name!r} is of type {tool.type!r}; this server hosts no tools, so only custom tools are supported."
        )
    if tool.input_schema is None:
        raise InputError(f"The tool {tool.name!r} has no input_schema.")
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }


def _choice(request: CountRequest, names: list[str]) -> str | NamedTool:
    choice = request.tool_choice
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if not names:
        raise InputError(f"tool_choice is {choice.type!r}, but there are no tools.")
    if choice.type == "any":
        return "required"
    if choice.name not in names:
        raise InputError(f"tool_choice names the tool {choice.name!r}, which does not exist. The tools: {', '.join(names)}.")
    return NamedTool(choice.name)


def _sampling(request: MessagesRequest, defaults: DefaultSampling) -> Sampling:
    return defaults.sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
    )


def _format(request: CountRequest) -> Format | None:
    format = request.output_format or (request.output_config or OutputConfig()).format
    return None if format is None else Format("schema", format.schema_)


def _template_kwargs(request: CountRequest) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if request.thinking is not None:
        kwargs["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        effort = request.output_config.effort
        kwargs["reasoning_effort"] = EFFORTS.get(effort, effort)
    return kwargs
