"""Conversion of the items of OpenAI's Responses to a conversation."""

import json
from collections.abc import Callable
from typing import Any

from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import InputError
from auraflux.serve.chat.conversation import Conversation, Format, Message, NamedTool, without_billing
from auraflux.serve.chat.images import ImageSource, content_of
from auraflux.serve.openai.responses_schema import Effort, ResponsesRequest, Text, TextFormat

LOGPROBS = "message.output_text.logprobs"
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
IMAGE_PARTS = frozenset({"input_image", "image_url"})
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def to_conversation(request: ResponsesRequest, user: str, defaults: DefaultSampling) -> Conversation:
    """Convert a Responses request."""
    _refuse_state(request)
    tools, choice = _chosen(functions(request), request.tool_choice)
    return Conversation(
        messages=to_messages(request),
        sampling=_sampling(request, defaults),
        tools=[{"type": "function", "function": _function(tool)} for tool in tools],
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        format=_format((request.text or Text()).format),
        template_kwargs=_template_kwargs((request.reasoning or Effort()).effort),
        thinking_budget=(request.reasoning or Effort()).max_tokens,
        user=user,
    )


def functions(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the function tools; tools hosted by OpenAI, which clients list too, are dropped."""
    found = []
    for number, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise InputError(f"tools.{number} has no name.")
        for key, type_, expected in (("parameters", dict, "an object"), ("description", str, "a string")):
            if tool.get(key) is not None and not isinstance(tool[key], type_):
                raise InputError(f"tools.{number}.{key} must be {expected}.")
        found.append(tool)
    return found


def to_messages(request: ResponsesRequest) -> list[Message]:
    """Return the messages; consecutive reasoning, text and calls become one assistant message."""
    messages: list[Message] = []
    if request.instructions:
        messages.append({"role": "system", "content": without_billing(request.instructions)})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise InputError("input has no items.")
    converter = _ItemConverter(messages)
    for number, item in enumerate(request.input):
        converter.add(item, f"input.{number}")
    return messages


class _ItemConverter:
    """Converter of items to messages, one item after another."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._names: dict[str, str] = {}
        self._kinds: dict[str, Callable[[Message, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "function_call_output": self._output,
            "custom_tool_call": self._custom_call,
            "custom_tool_call_output": self._output,
            "local_shell_call": self._shell_call,
            "local_shell_call_output": self._output,
        }

    def add(self, item: Any, at: str) -> None:
        if not isinstance(item, dict):
            raise InputError(f"{at} must be an object.")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "item_reference":
            raise InputError(f"{at} refers to a stored item, but this server stores none: send the item itself.")
        # a type may be any JSON value, also one that is not hashable
        convert = self._kinds.get(kind) if isinstance(kind, str) else None
        if convert is None:
            raise InputError(
                f"{at} is of type {kind!r}, which is not supported. The supported types: {', '.join(self._kinds)}."
            )
        convert(item, at)

    def _message(self, item: Message, at: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InputError(f"{at}.role is {role!r}; it must be one of {', '.join(ROLES)}.")
        if role == "user":
            self._messages.append({"role": "user", "content": _content(item.get("content"), f"{at}.content")})
            return
        text = _text(item.get("content"), f"{at}.content")
        if role != "assistant":
            self._messages.append({"role": ROLES[role], "content": text})
        else:
            self._assistant(fresh=True)["content"] = text

    def _reasoning(self, item: Message, at: str) -> None:
        # the full text if present, else its summary
        for key in ("content", "summary"):
            text = _text(item.get(key) or [], f"{at}.{key}")
            if text:
                message = self._assistant(fresh=True)
                message["reasoning_content"] = message.get("reasoning_content", "") + text
                return

    def _function_call(self, item: Message, at: str) -> None:
        name, text = _string(item, "name", at), _string(item, "arguments", at)
        try:
            given = json.loads(text or "{}")
        except (ValueError, RecursionError):
            given = None
        # arguments that are not a JSON object are passed on unchanged
        self._call(item, at, name, given if isinstance(given, dict) else text)

    def _custom_call(self, item: Message, at: str) -> None:
        self._call(item, at, _string(item, "name", at), {"input": _string(item, "input", at)})

    def _shell_call(self, item: Message, at: str) -> None:
        action = item.get("action")
        if not isinstance(action, dict):
            raise InputError(f"{at}.action must be an object.")
        self._call(item, at, "local_shell", action)

    def _call(self, item: Message, at: str, name: str, given: Message | str) -> None:
        call = _string(item, "call_id", at)
        self._names[call] = name
        calls = self._assistant(fresh=False).setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": given}})

    def _output(self, item: Message, at: str) -> None:
        call = item.get("call_id", item.get("id"))
        if not isinstance(call, str):
            raise InputError(f"{at}.call_id must be a string.")
        content = _content(item.get("output"), f"{at}.output")
        if call not in self._names:
            raise InputError(f"{at} is the output of call {call[:80]!r}, but no earlier item has that call.")
        self._messages.append({"role": "tool", "tool_call_id": call, "name": self._names[call], "content": content})

    def _assistant(self, fresh: bool) -> Message:
        """Return the assistant message that an item belongs to; with `fresh`, one without text and calls."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or (fresh and (last["content"] or "tool_calls" in last)):
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        return last


def _text(content: Any, at: str) -> str:
    return "\n".join(_text_part(part, where) for part, where in _parts(content, at))


def _content(content: Any, at: str) -> str | list[Message]:
    """Return the content of a user's message or of a tool's output, which may have images."""
    if isinstance(content, str):
        return content
    return content_of([_part(part, where) for part, where in _parts(content, at)])


def _part(part: dict[str, Any], at: str) -> str | ImageSource:
    if part["type"] not in IMAGE_PARTS:
        return _text_part(part, at)
    if part.get("image_url") is None:
        raise InputError(f"{at} has no image_url: this server stores no files, so send the image itself as a data URL.")
    url = part["image_url"]
    return ImageSource.of_url(url.get("url") if isinstance(url, dict) else url, at)


def _parts(content: Any, at: str) -> list[tuple[dict[str, Any], str]]:
    """Return the parts of a content with their places; a string is one part."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list):
        raise InputError(f"{at} must be a string or a list of parts.")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InputError(f"{at}.{number} must be an object with a type.")
    return [(part, f"{at}.{number}") for number, part in enumerate(content)]


def _text_part(part: dict[str, Any], at: str) -> str:
    kind = part["type"]
    if kind not in TEXT_PARTS and kind != "refusal":
        raise InputError(f"{at} is of type {kind!r}, which is not supported here: use text, or images in messages of users.")
    return _string(part, "refusal" if kind == "refusal" else "text", at)


def _string(item: Message, key: str, at: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InputError(f"{at}.{key} must be a string.")
    return value


def _refuse_state(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise InputError(f"{name} is not supported: this server is stateless, so send the complete history in input.")
    if request.background:
        raise InputError("background is not supported: this server does not store responses. Use stream.")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.get("parameters")
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
    }


def _chosen(tools: list[dict[str, Any]], choice: str | dict[str, Any] | None) -> tuple[list[dict[str, Any]], str | NamedTool]:
    """Return the tools that may be called, and the tool choice."""
    names = [tool["name"] for tool in tools]
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed = _allowed(choice, names)
            tools = [tool for tool in tools if tool["name"] in allowed]
            choice = choice.get("mode", "auto")
            if choice not in ("auto", "required"):
                raise InputError(f"tool_choice.mode is {choice!r}; it must be auto or required.")
        elif kind == "function":
            if choice.get("name") not in names:
                raise InputError(f"tool_choice names the tool {choice.get('name')!r}, which does not exist. {_there(names)}")
            return tools, NamedTool(choice["name"])
        else:
            raise InputError(f"tool_choice is of type {kind!r}; only function and allowed_tools are supported.")
    if choice == "required" and not tools:
        raise InputError("tool_choice is 'required', but there are no tools of type function.")
    return tools, choice or "auto"


def _allowed(choice: dict[str, Any], names: list[str]) -> list[str]:
    listed = choice.get("tools")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise InputError("tool_choice.tools must be a list of objects.")
    allowed = [each.get("name") for each in listed if each.get("type") == "function"]
    for name in allowed:
        if name not in names:
            raise InputError(f"tool_choice.tools names the tool {name!r}, which does not exist. {_there(names)}")
    return allowed


def _there(names: list[str]) -> str:
    return f"The tools: {', '.join(names)}." if names else "There are no tools of type function."


def _sampling(request: ResponsesRequest, defaults: DefaultSampling) -> Sampling:
    logprobs = request.top_logprobs if request.top_logprobs else 0 if LOGPROBS in (request.include or ()) else None
    return defaults.sampling(
        temperature=request.temperature, top_p=request.top_p, max_tokens=request.max_output_tokens, logprobs=logprobs
    )


def _format(format: TextFormat | None) -> Format | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Format("json")
    if format.schema_ is None:
        raise InputError("text.format is a json_schema, but has no schema.")
    return Format("schema", format.schema_)


def _template_kwargs(effort: str | None) -> dict[str, Any]:
    # templates have no effort "none"; those with optional reasoning have a switch
    if effort == "none":
        return {"enable_thinking": False}
    return {} if effort is None else {"reasoning_effort": effort}
