"""`Prompts`: conversations, strings and tokens become requests to the model.

Rendering and tokenizing take time, so the service calls these methods in worker threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from auraflux.engine.request import Request, ThinkingBudget
from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import ContextError, InputError, TemplateError
from auraflux.serve.chat.conversation import Conversation, Format, partial_reply, system_message_variants
from auraflux.serve.chat.images import prepare_images
from auraflux.serve.chat.structured_output import grammar_for, grammar_of
from auraflux.serve.failures import not_ready
from auraflux.serve.fill_in_middle import find_fill_tokens
from auraflux.serve.parse import Syntax, find_syntax
from auraflux.serve.transport.link import Link, ModelFacts
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.vision.messages import take_images
from auraflux.vision.processor import encode_prompt
from auraflux.vision.span import ImageSpan, PreparedImage
from auraflux.weights.formats.embedding import Embedding, usable_embedding

# characters at the prompt's end that determine how the answer begins
TAIL = 200
# tokens of reasoning by effort, for models whose template has no efforts; "high" has no limit
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}
# template arguments that only the server sets
RESERVED = ("self", "messages", "tools", "add_generation_prompt", "template")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a request.

    tail  end of the prompt, before any part of the answer that is continued
    """

    request: Request
    tail: str


class Prompts:
    """Requests to a link's model.

    image_urls  whether images are fetched from http(s) URLs
    """

    def __init__(self, link: Link, image_urls: bool = False):
        self.link, self.image_urls = link, image_urls
        self._syntax: Syntax | None = None

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model; Failure 503 while it is unavailable."""
        if self.link.facts is None:
            raise not_ready(self.link.unavailable_reason)
        return self.link.facts

    @property
    def default_sampling(self) -> DefaultSampling:
        """Sampling settings of requests that leave them out."""
        return self.facts.default_sampling

    @property
    def tokenizer(self) -> Tokenizer:
        facts = self.facts
        if self.link.tokenizer is None:
            raise InputError(f"The model {facts.name} has no tokenizer; use /v1/completions with token ids instead of text.")
        return self.link.tokenizer

    @property
    def syntax(self) -> Syntax:
        """The model's syntax of reasoning and tool calls."""
        if self._syntax is None:
            templates = self.tokenizer.templates
            self._syntax = find_syntax(self.facts.model_type, templates.get("tool_use") or templates.get("default"))
        return self._syntax

    @property
    def embedding(self) -> Embedding:
        """Settings of the model's embeddings; refuse a model that has none."""
        return usable_embedding(self.facts.embedding, self.facts.name)

    def chat(self, conversation: Conversation) -> ChatPrompt:
        """Return the request for an answer to a conversation, or for the rest of its last message."""
        begun, images = "", self._images(conversation)
        if conversation.continue_final_message:
            reasoning, content = partial_reply(conversation)
            begun = content or reasoning
            text = self._render(replace(conversation, messages=conversation.messages[:-1]))
            text += self.syntax.reply_opening(text[-TAIL:], reasoning, content)
        else:
            text = self._render(conversation)
        tail = text[-TAIL:]
        grammar = grammar_for(conversation, self.syntax, tail, self.tokenizer)
        tokens, spans = self._encode(text + begun, images)
        stop_token_ids = self.facts.eos_token_ids | self.tokenizer.end_of_turn_ids
        request = Request(
            tuple(tokens),
            replace(conversation.sampling, grammar=grammar or conversation.sampling.grammar),
            user=conversation.user,
            visible_special_tokens=frozenset(self._ids(self.syntax.visible_tokens)),
            stop_token_ids=stop_token_ids - frozenset(self._ids(self.syntax.non_stop_tokens)),
            thinking=self._thinking_budget(conversation, tail),
            images=spans,
        )
        return ChatPrompt(self.fitted(request), tail)

    def completions(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling,
        *,
        format: Format | None,
        user: str,
        prompt_logprobs: int | None = None,
        suffix: str = "",
    ) -> list[Request]:
        """Return the requests to continue prompts, or to fill in between each and a suffix."""
        settings = replace(sampling, grammar=None if format is None else grammar_of(format))
        if suffix:
            return [self.fitted(self._filling(prompt, suffix, settings, user)) for prompt in prompts]
        tokens = [self._tokens(prompt) for prompt in prompts]
        return [self.fitted(Request(each, settings, user=user, prompt_logprobs=prompt_logprobs)) for each in tokens]

    def embeddings(
        self, inputs: Sequence[str | Sequence[int]], *, user: str, prompt_name: str | None = None, truncate: bool = False
    ) -> list[Request]:
        """Return the requests to embed inputs.

        prompt_name  of the model's prompts, which precedes each text; None for the default one
        truncate     whether inputs that exceed the context are cut
        """
        prompt, pooling = self.embedding.prompt(prompt_name), self.embedding.pooling
        found = [self._tokens(prompt + text if isinstance(text, str) else text) for text in inputs]
        if truncate:
            found = [self._cut(tokens) for tokens in found]
        return [self.fitted(Request(tokens, user=user, pooling=pooling)) for tokens in found]

    def tokens(self, conversation: Conversation, add_generation_prompt: bool) -> list[int]:
        """Return the tokens of a conversation's prompt."""
        images = self._images(conversation)
        return self._encode(self._render(conversation, add_generation_prompt), images)[0]

    def fitted(self, request: Request) -> Request:
        """Check a request against the model's limits, and clamp max_tokens to the context length."""
        facts, length = self.facts, len(request.prompt)
        if not length:
            raise InputError("The prompt is empty; give it at least one token.")
        if request.pooling is not None and length > facts.context:
            raise ContextError(f"The input has {length} tokens; the context is limited to {facts.context}.")
        if request.pooling is None and length >= facts.context:
            raise ContextError(f"The prompt has {length} tokens; prompt and answer must fit into a context of {facts.context}.")
        for field, tokens in (("the prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
            wrong = next((token for token in tokens if not 0 <= token < facts.vocab), None)
            if wrong is not None:
                raise InputError(f"Token id {wrong} in {field} is outside the model's vocabulary of {facts.vocab} tokens.")
        requested, room = request.sampling.max_tokens, facts.context - length
        if requested is None or requested <= room:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=room))

    def _images(self, conversation: Conversation) -> list[PreparedImage]:
        """Decode the images of a conversation; refuse them if the model takes none."""
        return prepare_images(take_images(conversation.messages)[1], self.facts, self.image_urls)

    def _encode(self, text: str, images: list[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return the tokens of a rendered conversation, and its images among them."""
        encode, processor = partial(self.tokenizer.encode, special=False), self.facts.images
        return encode_prompt(text, images, processor, encode) if images and processor is not None else (encode(text), ())

    def _thinking_budget(self, conversation: Conversation, tail: str) -> ThinkingBudget | None:
        """Return the limit of reasoning that a request sets, by tokens or, for a template without efforts, by its effort."""
        most, effort = conversation.thinking_budget, conversation.template_kwargs.get("reasoning_effort")
        if most is None and not any("reasoning_effort" in source for source in self.tokenizer.templates.values()):
            most = EFFORT_BUDGETS.get(effort) if isinstance(effort, str) else None
        if most is None:
            return None
        return self.syntax.thinking_budget(most, tail, partial(self.tokenizer.encode, special=False))

    def _render(self, conversation: Conversation, add_generation_prompt: bool = True) -> str:
        for name in RESERVED:
            if name in conversation.template_kwargs:
                raise InputError(f"chat_template_kwargs must not contain {name!r}: the server sets it.")
        tools, kwargs = offered_tools(conversation), conversation.template_kwargs
        first: TemplateError | None = None
        for messages in system_message_variants(take_images(conversation.messages)[0]):
            try:
                return self.tokenizer.apply_template(messages, add_generation_prompt, **kwargs, tools=tools)
            except TemplateError as err:
                first = first or err
        raise first or TemplateError("There are no messages.")

    def _filling(self, prompt: str | Sequence[int], suffix: str, sampling: Sampling, user: str) -> Request:
        """Return the request to fill in between a prompt and a suffix."""
        fill = find_fill_tokens(self.tokenizer)
        if fill is None:
            raise InputError(f"The model {self.facts.name} cannot fill in the middle: its vocabulary has no tokens for that.")
        if not isinstance(prompt, str):
            raise InputError("suffix needs a prompt of text, not of tokens.")
        tokens = tuple(fill.prompt(self.tokenizer, prompt, suffix))
        return Request(tokens, sampling, user=user, stop_token_ids=self.facts.eos_token_ids | fill.stop_ids)

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _ids(self, names: Sequence[str]) -> list[int]:
        found = (self.tokenizer.token_id(name) for name in names)
        return [number for number in found if number is not None]

    def _cut(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return tokens cut to the context; a special token at their end, which pooling may read, stays."""
        most = self.facts.context
        if len(tokens) <= most:
            return tokens
        special = self.link.tokenizer is not None and tokens[-1] in self.link.tokenizer.special_ids
        return (*tokens[: most - 1], tokens[-1]) if special else tokens[:most]


def offered_tools(conversation: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools for the template; None if there are none, which templates test for."""
    return conversation.tools if conversation.tools and conversation.tool_choice != "none" else None
