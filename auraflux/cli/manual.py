"""Write docs/cli.md from the --help of every command: `make docs`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

HEAD = """\
# The command line

Every command and its options, as `--help` prints them. Written by `make docs`.
"""
WIDTH = 100


def manual(program: click.Group) -> str:
    """The whole page."""
    return "\n".join([HEAD, *_sections(program, None, "auraflux")])


def _sections(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    # the width comes from the context, so that the page does not depend on anyone's terminal
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.make_context(name, [], parent, resilient_parsing=True, **width)
    yield f"## {context.command_path}\n\n```\n{command.get_help(context).strip()}\n```\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _sections(found, context, child)


if __name__ == "__main__":
    from auraflux.cli import main

    Path(sys.argv[1]).write_text(manual(main))
