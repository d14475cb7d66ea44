"""`Command`: a command with grouped help, --help-all, and the flags of other engines; `Group` corrects command names."""

from difflib import get_close_matches
from functools import cached_property
from typing import Any, NoReturn

import click

from auraflux.cli.options.peer_flags import PeerFlag, peer_flags
from auraflux.cli.options.sections import OTHER, SECTIONS

SHOW_ALL = "auraflux.cli.help_all"  # in the context's meta: --help lists all options
# commands of other engines, by what they are called here
PEER_COMMANDS = {
    "cli": "chat",
    "repl": "chat",
    "complete": "generate",
    "completion": "generate",
    "server": "serve",
    "api": "serve",
    "download": "pull",
    "ls": "list",
    "remove": "rm",
    "delete": "rm",
    "models": "list",
    "info": "inspect",
    "quantize": "convert",
    "benchmark": "bench",
    "perplexity": "eval",
    "version": "--version",
    "help": "--help",
}


class Command(click.Command):
    """A command whose --help may show only everyday options.

    everyday  flags that --help shows, in this order; --help-all shows all, by section. Empty: --help shows all
    examples  command lines, after the options
    """

    def __init__(self, *args: Any, everyday: tuple[str, ...] = (), examples: tuple[str, ...] = (), **settings: Any):
        super().__init__(*args, **settings)
        self.everyday, self.examples = everyday, examples
        if everyday:
            self.params.append(_help_all())

    @cached_property
    def _peer_flags(self) -> list[PeerFlag]:
        return peer_flags(self.params)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self._peer_flags]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # a flag that is refused has no value
        refused = {param.opts[0] for param in self._peer_flags if param.target is None}
        args = [word.partition("=")[0] if word.partition("=")[0] in refused else word for word in args]
        self._check_temperature(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as err:
            self._refuse(ctx, err.option_name)
        except click.UsageError as err:
            if ctx.args or "unexpected extra argument" not in err.message or "prompts" not in ctx.params:
                raise
            raise click.UsageError(f"{err.message}. A prompt is given with -p.", ctx) from err

    def _check_temperature(self, ctx: click.Context, args: list[str]) -> None:
        """Refuse -t 8: llama.cpp's -t is the number of threads, and as a temperature 2 and more give nonsense."""
        if not any("-t" in param.opts and param.name == "temperature" for param in self.params):
            return
        for word, after in zip(args, [*args[1:], ""], strict=False):
            given = after if word == "-t" else word.removeprefix("-t") if word.startswith("-t") else ""
            if given.isdecimal() and int(given) >= 2:
                raise click.UsageError(
                    f"-t {given[:20]} would be the temperature. For threads set the environment variable NUMBA_NUM_THREADS; "
                    f"for this temperature give --temperature {given[:20]}.",
                    ctx,
                )

    def _refuse(self, ctx: click.Context, flag: str) -> NoReturn:
        visible = [
            each
            for param in self.params
            if isinstance(param, click.Option) and not param.hidden
            for each in (*param.opts, *param.secondary_opts)
        ]
        similar = get_close_matches(flag, visible, n=3, cutoff=0.7)
        meant = f" Did you mean {' or '.join(similar)}?" if similar else ""
        how = "--help-all" if self.everyday else "--help"
        raise click.UsageError(f"No such option: {flag}.{meant} '{ctx.command_path} {how}' lists all options.", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        if self.everyday and not ctx.meta.get(SHOW_ALL):
            by_flag = {flag: option for option in options for flag in option.opts}
            shown = [by_flag[flag] for flag in (*self.everyday, "--help", "--help-all")]
            _write(ctx, formatter, "Options", shown)
            return
        if not self.everyday:
            _write(ctx, formatter, "Options", options)
            return
        for title, flags in SECTIONS.items():
            _write(ctx, formatter, title, [option for option in options if flags & {*option.opts}])
        known = {flag for flags in SECTIONS.values() for flag in flags}
        _write(ctx, formatter, OTHER, [option for option in options if not known & {*option.opts}])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _write(ctx: click.Context, formatter: click.HelpFormatter, title: str, options: list[click.Option]) -> None:
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _help_all() -> click.Option:
    def show(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[SHOW_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help="Show all options and exit."
    )


class Group(click.Group):
    """A group that answers an unknown command with the name of the right one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = PEER_COMMANDS.get(name) if ctx.parent is None else None
            similar = [meant] if meant else get_close_matches(name, self.list_commands(ctx), n=2)
            hint = f"Did you mean {' or '.join(f'{ctx.command_path} {each}' for each in similar)}?" if similar else ""
            known = f"The commands are: {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(f"No such command: {name[:80]}. {hint or known}", ctx)
        return super().resolve_command(ctx, args)
