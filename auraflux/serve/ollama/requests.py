"""Conversion of Ollama's requests to OpenAI's, which become conversations."""

from typing import Any

from auraflux.errors import InputError
from auraflux.serve.listing import Listing
from auraflux.serve.ollama.schema import AnswerFields, ChatRequest, GenerateRequest, Message
from auraflux.serve.openai import schema as openai
from auraflux.serve.parse import find_syntax
from auraflux.serve.service import Service

EFFORTS = ("low", "medium", "high", "max")


def chat_request(service: Service, body: ChatRequest) -> openai.ChatCompletionRequest:
    """Convert a chat request; refuse what the model's chat template lacks."""
    if body.tools and "tools" not in capabilities(service.describe()):
        raise InputError(f"The model {service.prompts.facts.name} does not support tools: its chat template has none.")
    return _with_messages(service, body, _messages(body.messages or []), tools=body.tools)


def prompt_request(service: Service, body: GenerateRequest) -> openai.ChatCompletionRequest:
    """Convert a generate request whose prompt is a user's message."""
    messages = [openai.Message(role="system", content=body.system)] if body.system else []
    content = _content(body.prompt, body.images, "the prompt")
    return _with_messages(service, body, [*messages, openai.Message(role="user", content=content)])


def check_generate(body: GenerateRequest) -> None:
    """Refuse the fields of a generate request that change its meaning and are not supported."""
    if body.images and (body.raw or body.suffix):
        raise InputError("images cannot be combined with raw or suffix: the chat template places them.")
    if body.template:
        raise InputError("template is not supported: give a complete prompt with raw: true instead.")
    if body.context:
        raise InputError("context is not supported: send the earlier messages to /api/chat.")


def capabilities(model: Listing) -> list[str]:
    """Return Ollama's names for what a model can do."""
    embedding, templates = model.embedding, model.templates
    if embedding is not None and embedding.refusal is None:
        return ["embedding"]
    if templates is None:
        return ["completion"]
    syntax = find_syntax(model.model_type, templates.get("tool_use") or templates.get("default"))
    found = ["completion", *(["insert"] if model.fills_middle else [])]
    if "tool_use" in templates or "tools" in templates.get("default", ""):
        found.append("tools")
    if model.takes_images:
        found.append("vision")
    if templates and (syntax.may_think or syntax.reply_channels is not None):
        found.append("thinking")
    return found


def sampling_fields(body: AnswerFields) -> dict[str, Any]:
    """Return the sampling settings and the format in OpenAI's fields."""
    fields: dict[str, Any] = {"response_format": _format(body.format)}
    options = body.options
    if options is None:
        return fields
    return fields | {
        "temperature": options.temperature,
        # 0 keeps the most likely token only
        "top_p": 1e-6 if options.top_p == 0 else options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        # -1 stands for a random seed
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
    }


def _with_messages(
    service: Service, body: AnswerFields, messages: list[openai.Message], **more: Any
) -> openai.ChatCompletionRequest:
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": body.top_logprobs} if body.logprobs else {}
    return openai.ChatCompletionRequest(
        messages=messages, **sampling_fields(body), **_thinking(service, body), **logprobs, **more
    )


def _thinking(service: Service, body: AnswerFields) -> dict[str, Any]:
    """Return the reasoning switch and effort for the chat template."""
    think = body.think
    if think is None:
        return {}
    if isinstance(think, str) and think not in EFFORTS:
        raise InputError(f"think is {think[:80]!r}; it must be true, false, {', '.join(map(repr, EFFORTS))}.")
    if think and "thinking" not in capabilities(service.describe()):
        raise InputError(f"The model {service.prompts.facts.name} does not support thinking: its chat template has none.")
    # templates know one name or the other
    switch = {"chat_template_kwargs": dict.fromkeys(("enable_thinking", "thinking"), bool(think))}
    return switch if isinstance(think, bool) else {**switch, "reasoning_effort": think}


def _format(given: str | dict[str, Any] | None) -> openai.ResponseFormat | None:
    if given is None or given == "":
        return None
    if isinstance(given, dict):
        return openai.ResponseFormat(type="json_schema", json_schema=openai.JsonSchema(schema=given))
    if given != "json":
        raise InputError(f"format is {given[:80]!r}; it must be 'json' or a JSON schema.")
    return openai.ResponseFormat(type="json_object")


def _messages(messages: list[Message]) -> list[openai.Message]:
    """Convert messages; results refer to calls by id, by the tool's name, or by their order."""
    converted = []
    pending: dict[str, str] = {}
    for number, message in enumerate(messages):
        calls = [
            openai.Call(
                id=call.id or f"call_{number}_{index}",
                function=openai.CalledFunction(name=call.function.name, arguments=call.function.arguments),
            )
            for index, call in enumerate(message.tool_calls or ())
        ]
        pending |= {str(call.id): call.function.name for call in calls}
        name = message.tool_name or message.name
        converted.append(
            openai.Message(
                role=message.role,
                content=_content(message.content, message.images, f"messages.{number}"),
                reasoning=message.thinking,
                tool_calls=calls or None,
                tool_call_id=_answered(message, name, pending) if message.role == "tool" else None,
                name=name,
            )
        )
    return converted


def _content(text: str | None, images: list[Any] | None, where: str) -> str | list[openai.ContentPart] | None:
    """Return a message's content: its images, which are base64, before its text."""
    if not images:
        return text
    for number, image in enumerate(images):
        if not isinstance(image, str) or not image:
            raise InputError(f"{where}.images.{number} must be an image in base64.")
    urls = [image if image.startswith("data:") else f"data:image/*;base64,{image}" for image in images]
    parts = [openai.ContentPart(type="image_url", image_url=url) for url in urls]
    return [*parts, *([openai.ContentPart(type="text", text=text)] if text else [])]


def _answered(message: Message, name: str | None, pending: dict[str, str]) -> str | None:
    """Return the id of the call that a message is the result of, and remove it from the pending ones."""
    named = (call for call, tool in pending.items() if tool == name)
    found = message.tool_call_id if message.tool_call_id in pending else next(named, next(iter(pending), None))
    if found is not None:
        del pending[found]
    return found
