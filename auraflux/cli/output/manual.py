"""Generator of the docs pages that describe the program: `make docs`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from auraflux.cli.options.command import SHOW_ALL
from auraflux.cli.options.environment import environment
from auraflux.cli.output.kernels_page import kernels_page
from auraflux.cli.output.ops_page import ops_page

HEAD = """\
# The command line

Every command and its options, as `--help-all` prints them, and the [environment variables](#environment-variables).
Written by `make docs`.
"""
WIDTH = 100


def pages(program: click.Group) -> dict[str, str]:
    """Return every page by its name."""
    return {"cli.md": manual(program), "ops.md": ops_page()}


def manual(program: click.Group) -> str:
    """Return the page about the command line."""
    return "\n".join([HEAD, *_sections(program, None, "auraflux"), environment()])


def _sections(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    # a fixed width, so the page does not depend on the terminal
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.make_context(name, [], parent, resilient_parsing=True, **width)
    context.meta[SHOW_ALL] = True
    yield f"## {context.command_path}\n\n```\n{command.get_help(context).strip()}\n```\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _sections(found, context, child)


if __name__ == "__main__":
    from auraflux.cli import main
    from auraflux.ops.explain import explain_all_cases

    made = pages(main) | {"kernels.md": kernels_page(explain_all_cases(("cuda",))["cuda"])}
    for page, text in made.items():
        (Path(sys.argv[1]) / page).write_text(text)
