"""`auraflux chat`: a conversation in the terminal."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.generate import figures
from auraflux.cli.options.command import Command
from auraflux.cli.options.images import image_option, user_message
from auraflux.cli.options.model import LOADING, RANKS, SAMPLING, first_adapter, load_model, model_argument, options, sampling
from auraflux.cli.options.stdin import read_line, stdin
from auraflux.cli.output.expert_stats import show_expert_stats
from auraflux.errors import AurafluxError, InputError

if TYPE_CHECKING:
    from auraflux.loading.language_model import LanguageModel

HELP = """\
/reset           forget the conversation
/system TEXT     start a new conversation with TEXT as the system message
/image FILE      show the model a picture with the next message
/stats           statistics of the last answer
/help            list the commands
/exit            leave; so does Ctrl-D
Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer."""


EVERYDAY = (
    "--system",
    "--max-tokens",
    "--temperature",
    "--top-p",
    "--seed",
    "--device",
    "--kv",
    "--context",
    "--quantize",
    "--gpu-memory",
    "--expert-memory",
    "--speculate",
)
EXAMPLES = (
    "auraflux chat",
    'auraflux chat org/name --system "Answer in one sentence."',
    "auraflux chat model.gguf --gpu-memory 8GB",
)


@click.command(cls=Command, everyday=EVERYDAY, examples=EXAMPLES)
@model_argument
@click.option("--system", metavar="TEXT", help="System message.")
@image_option
@options(LOADING)
@options(RANKS)
@options(SAMPLING)
@click.option("--stats", is_flag=True, help="Show the expert cache's hits, misses and reads after each answer.")
def chat(model: str | None, system: str | None, images: tuple[Path, ...], stats: bool, **chosen: Any) -> None:
    """Chat with a model in the terminal.

    MODEL is a folder, a GGUF file or a name; without it, the built-in model.
    """
    converse(model, system, stats, chosen, images=images)


def converse(
    model: str | None,
    system: str | None,
    stats: bool,
    chosen: dict[str, Any],
    question: str | None = None,
    images: tuple[Path, ...] = (),
) -> None:
    """Load a model and answer lines until the input ends, or one question; the first message has these pictures."""
    settings = sampling(chosen) | first_adapter(chosen)
    if question is None:
        stdin()
    loaded = load_model(model, chosen, chat=True)
    kv = loaded.engine.cache.settings.kv
    from auraflux.engine.request import check_generates

    check_generates(loaded.generates)
    if images and loaded.vision is None:
        raise InputError(f"{loaded.path.name} takes no images: {loaded.no_images}.")
    conversation = Conversation(loaded, system, settings, kv, stats)
    conversation.images = list(images)
    if question is not None:
        conversation.answer(question)
        return
    facts = f"{loaded.path.stem}, context {loaded.context} tokens, KV cache {kv}, {loaded.default_sampling}"
    click.echo(f"{facts}. /help lists the commands.", err=True)
    conversation.run(_reader())


class Conversation:
    """A conversation in the terminal: its messages, and the commands that change it.

    stats  show the expert cache's statistics after each answer
    """

    def __init__(self, model: "LanguageModel", system: str | None, settings: dict[str, Any], kv: str, stats: bool = False):
        self.model, self.settings, self.kv, self.stats = model, settings, kv, stats
        self.messages: list[dict[str, Any]] = []
        self.images: list[Path] = []
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system, self.images = system, []
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self, read: Callable[[], str | None]) -> None:
        """Answer lines until the input ends or the user exits."""
        while (line := read()) is not None:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                self.command(text)
            elif text:
                self.answer(text)

    def command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "/reset":
            self.reset(self.system)
            click.echo("Conversation cleared.", err=True)
        elif word == "/system":
            self.reset(rest.strip() or None)
            click.echo("New conversation.", err=True)
        elif word == "/image":
            self.add_image(rest.strip())
        elif word == "/stats":
            click.echo(figures(self.model.stats, self.kv), err=True)
            show_expert_stats(self.model.stats.experts)
        elif word == "/help":
            click.echo(HELP, err=True)
        else:
            click.echo(f"unknown command {word}. /help lists the commands.", err=True)

    def add_image(self, path: str) -> None:
        """Take a picture for the next message, if there is one and the model takes it."""
        if self.model.vision is None:
            click.echo(f"error: the model takes no images: {self.model.no_images}.", err=True)
        elif not Path(path).is_file():
            click.echo(f"error: there is no file {path!r}.", err=True)
        else:
            self.images.append(Path(path))
            click.echo("The picture goes with the next message.", err=True)

    def answer(self, text: str) -> None:
        """Stream the answer to a message; an answer that is stopped stays in the conversation as far as it was generated."""
        messages = [*self.messages, user_message(text, self.images)]
        received: list[str] = []
        try:
            for delta in self.model.chat(messages, **self.settings):
                received.append(delta)
                click.echo(delta, nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        except AurafluxError as err:
            click.echo(f"error: {err}", err=True)
            self.images = []
            return
        click.echo()
        self.images = []
        self.messages = [*messages, {"role": "assistant", "content": "".join(received)}]
        click.secho(figures(self.model.stats, self.kv), dim=True, err=True)
        if self.stats:
            show_expert_stats(self.model.stats.experts)


def _reader() -> Callable[[], str | None]:
    """Return a function that reads lines, with history and multi-line input on a terminal; it returns None at the end."""
    if not (stdin().isatty() and sys.stderr.isatty()):
        return read_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    from auraflux.weights.download.pull import models_folder

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    history = models_folder().parent / "chat_history"
    history.parent.mkdir(parents=True, exist_ok=True)
    session: Any = PromptSession(history=FileHistory(str(history)), multiline=True, key_bindings=keys)

    def read() -> str | None:
        while True:
            try:
                return session.prompt("> ")
            except KeyboardInterrupt:
                click.echo("Ctrl-D or /exit leaves.", err=True)
            except EOFError:
                return None

    return read
