"""Old spellings of options: they work for one release, stay out of --help, and print a one-line notice on stderr."""

from collections.abc import Mapping
from typing import Any

import click

PRINTED = "auraflux.cli.options.renamed"


class Renamed(click.Option):
    """An option that also accepts its old spelling, `old`."""

    def __init__(self, *args: Any, old: str, **settings: Any):
        super().__init__(*args, **settings)
        self.old = old

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        action, const = ("store_const", True) if self.is_flag else ("append" if self.multiple else "store", None)
        parser.add_option(obj=self, opts=[self.old], dest=self.old, action=action, nargs=self.nargs, const=const)

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> tuple[Any, list[str]]:
        if self.old in opts:
            notice(ctx, self.old, self.opts[0])
            name, given = str(self.name), opts[self.old]
            # values of both spellings are joined where the option repeats; otherwise the new spelling wins
            opts = {**opts, name: [*given, *opts.get(name, ())]} if self.multiple else {name: given, **opts}
        return super().handle_parse_result(ctx, opts, args)


def notice(ctx: click.Context, old: str, new: str, verb: str = "is now") -> None:
    """Print the new spelling, once per command line."""
    printed = ctx.meta.setdefault(PRINTED, set())
    if old not in printed:
        printed.add(old)
        click.echo(f"note: {old} {verb} {new}.", err=True)
