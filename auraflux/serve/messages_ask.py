"""From Anthropic's messages to a conversation as chat templates read it."""

from collections.abc import Callable
from typing import Any

from auraflux.errors import InputError
from auraflux.run.sampling import Sampling
from auraflux.serve.ask import Ask, Format, Named
from auraflux.serve.conversation import Message, without_billing
from auraflux.serve.messages_schema import CountRequest, CustomTool, MessagesRequest, OutputConfig, Turn

# templates know three levels
EFFORTS = {"xhigh": "high", "max": "high"}


def to_ask(request: CountRequest, user: str) -> Ask:
    """Turn a request into what the model is asked."""
    tools = [_tool(tool) for tool in request.tools or ()]
    choice = request.tool_choice
    return Ask(
        messages=conversation(request),
        sampling=_sampling(request) if isinstance(request, MessagesRequest) else Sampling(),
        tools=tools,
        tool_choice=_choice(request, [tool["function"]["name"] for tool in tools]),
        parallel=not (choice and choice.disable_parallel_tool_use),
        format=_format(request),
        values=_values(request),
        user=user,
    )


def conversation(request: CountRequest) -> list[Message]:
    """Give the messages: results of tools become messages of their own, neighbours of one role become one."""
    messages: list[Message] = []
    system = without_billing(_text(request.system or "", "system"))
    if system:
        messages.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for number, turn in enumerate(request.messages):
        for message in _TURNS[turn.role](turn, f"messages.{number}.content", names):
            _append(messages, message)
    if request.messages[-1].role == "assistant":
        raise InputError(
            "The last message is the assistant's, and an answer that has begun is not continued here. End with the user's."
        )
    return messages


def _append(messages: list[Message], message: Message) -> None:
    role = message["role"]
    last = messages[-1] if messages else {}
    if last.get("role") != role or role not in ("user", "assistant"):
        messages.append(message)
        return
    between = "\n" if role == "user" and last["content"] and message["content"] else ""
    last["content"] += between + message["content"]
    if role == "assistant":
        for key, empty in (("tool_calls", []), ("reasoning_content", "")):
            if key in message:
                last[key] = last.get(key, empty) + message[key]


def _user_turn(turn: Turn, where: str, names: dict[str, str]) -> list[Message]:
    blocks = _blocks(turn.content, where)
    results = [_result(block, at, names) for block, at in blocks if block["type"] == "tool_result"]
    said = [block for block, _ in blocks if block["type"] != "tool_result"]
    if said or not results:
        results.append({"role": "user", "content": _text(said, where)})
    return results


def _assistant_turn(turn: Turn, where: str, names: dict[str, str]) -> list[Message]:
    message: Message = {"role": "assistant", "content": ""}
    for block, at in _blocks(turn.content, where):
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
                f"{at} is of type {kind!r}, which the assistant's messages do not have here: text, thinking and tool_use are."
            )
    return [message]


def _system_turn(turn: Turn, where: str, names: dict[str, str]) -> list[Message]:
    return [{"role": "system", "content": without_billing(_text(turn.content, where))}]


_TURNS: dict[str, Callable[[Turn, str, dict[str, str]], list[Message]]] = {
    "user": _user_turn,
    "assistant": _assistant_turn,
    "system": _system_turn,
}


def _call(block: Message, at: str) -> Message:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InputError(f"{at}.input is {_shown(given)}; it must be an object.")
    name = _string(block, "name", at)
    return {"id": _string(block, "id", at), "type": "function", "function": {"name": name, "arguments": given}}


def _result(block: Message, at: str, names: dict[str, str]) -> Message:
    call = _string(block, "tool_use_id", at)
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise InputError(f"{at}.content is {_shown(content)}; it must be a string or a list of blocks.")
    text = _text(content or "", f"{at}.content")
    if call not in names:
        raise InputError(f"{at} is the result of tool_use {call[:80]!r}, and no message before it has that tool_use.")
    text = f"Error: {text}" if block.get("is_error") is True else text
    return {"role": "tool", "tool_call_id": call, "name": names[call], "content": text}


def _blocks(content: str | list[Any], where: str) -> list[tuple[Message, str]]:
    """Give blocks with where they are; text alone is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    found = []
    for number, block in enumerate(content):
        at = f"{where}.{number}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InputError(f"{at} is {_shown(block)}; it must be an object with a type.")
        found.append((block, at))
    return found


def _text(content: str | list[Any], where: str) -> str:
    texts = []
    for block, at in _blocks(content, where):
        if block["type"] != "text":
            raise InputError(f"{at} is of type {block['type']!r}; this model reads text only.")
        texts.append(_string(block, "text", at))
    return "\n".join(texts)


def _string(block: Message, key: str, at: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InputError(f"{at}.{key} is {_shown(value)}; it must be a string.")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _tool(tool: CustomTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InputError(
            f"The tool {tool.name!r} is of type {tool.type!r}; this server runs no tools, so give only custom ones."
        )
    if tool.input_schema is None:
        raise InputError(f"The tool {tool.name!r} has no input_schema.")
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }


def _choice(request: CountRequest, names: list[str]) -> str | Named:
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
        raise InputError(f"tool_choice names the tool {choice.name!r}, which is not there. The tools: {', '.join(names)}.")
    return Named(choice.name)


def _sampling(request: MessagesRequest) -> Sampling:
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
    )


def _format(request: CountRequest) -> Format | None:
    asked = request.output_format or (request.output_config or OutputConfig()).format
    return None if asked is None else Format("schema", asked.schema_)


def _values(request: CountRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if request.thinking is not None:
        values["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        effort = request.output_config.effort
        values["reasoning_effort"] = EFFORTS.get(effort, effort)
    return values
