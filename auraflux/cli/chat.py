"""`auraflux chat`: a conversation in the terminal."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.generate import figures
from auraflux.cli.options import LOADING, RANKS, SAMPLING, load_model, model_argument, options, sampling
from auraflux.cli.stdin import read_line, stdin
from auraflux.cli.traffic import show_traffic
from auraflux.errors import AurafluxError

if TYPE_CHECKING:
    from auraflux.run.language import LanguageModel

HELP = """\
/reset           forget the conversation
/system TEXT     begin anew, telling the model TEXT first
/stats           figures of the last answer
/help            this
/exit            leave; so does Ctrl-D
Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer."""


@click.command()
@model_argument
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@options(LOADING)
@options(RANKS)
@options(SAMPLING)
@click.option("--stats", is_flag=True, help="Show after each answer what was read of a packed model's experts.")
def chat(model: str | None, system: str | None, stats: bool, **chosen: Any) -> None:
    """Talk with a model.

    MODEL is a folder, a GGUF file or a name; with none, the built-in default.
    """
    settings = sampling(chosen, temperature=0.7, top_p=0.95)
    stdin()
    loaded = load_model(model, chosen, chat=True)
    kv = loaded.engine.cache.settings.kv
    click.echo(f"{loaded.path.stem}, context {loaded.context} tokens, cache {kv}. /help lists the commands.", err=True)
    Conversation(loaded, system, settings, kv, stats).run(_reader())


class Conversation:
    """The messages so far, and what to do with the next line.

    stats  show after each answer what was read of experts
    """

    def __init__(self, model: "LanguageModel", system: str | None, settings: dict[str, Any], kv: str, stats: bool = False):
        self.model, self.settings, self.kv, self.stats = model, settings, kv, stats
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self, read: Callable[[], str | None]) -> None:
        """Answer until there is nothing more to read."""
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
            click.echo("The conversation is forgotten.", err=True)
        elif word == "/system":
            self.reset(rest.strip() or None)
            click.echo("A new conversation begins.", err=True)
        elif word == "/stats":
            click.echo(figures(self.model.stats, self.kv), err=True)
            show_traffic(self.model.stats.experts)
        elif word == "/help":
            click.echo(HELP, err=True)
        else:
            click.echo(f"there is no command {word}. /help lists them.", err=True)

    def answer(self, text: str) -> None:
        """Show the answer as it comes. One that was stopped stays in the conversation as far as it went."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self.model.chat(asked, **self.settings):
                pieces.append(piece)
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        except AurafluxError as err:
            click.echo(f"error: {err}", err=True)
            return
        click.echo()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        click.secho(figures(self.model.stats, self.kv), dim=True, err=True)
        if self.stats:
            show_traffic(self.model.stats.experts)


def _reader() -> Callable[[], str | None]:
    """Read lines with history and several-line input from a terminal, plain lines from anything else; None at the end."""
    if not (stdin().isatty() and sys.stderr.isatty()):
        return read_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    from auraflux.weights.pull import models_folder

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
