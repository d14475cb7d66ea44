"""Write the pages of docs that are made from the program itself: `make docs`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from auraflux.cli.environment import environment
from auraflux.cli.kernels_page import kernels_page
from auraflux.cli.ops_page import ops_page

HEAD = """\
# The command line

Every command and its options, as `--help` prints them, and the [environment variables](#environment-variables).
Written by `make docs`.
"""
WIDTH = 100


def pages(program: click.Group) -> dict[str, str]:
    """Every page by its name."""
    return {"cli.md": manual(program), "ops.md": ops_page()}


def manual(program: click.Group) -> str:
    """The page about the command line."""
    return "\n".join([HEAD, *_sections(program, None, "auraflux"), environment()])


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
    from auraflux.ops.explain import all_verdicts

    made = pages(main) | {"kernels.md": kernels_page(all_verdicts(("cuda",))["cuda"])}
    for page, text in made.items():
        (Path(sys.argv[1]) / page).write_text(text)
