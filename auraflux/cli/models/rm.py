"""`auraflux rm`: delete downloaded models."""

import click

from auraflux.cli.options.command import Command
from auraflux.cli.output.units import size
from auraflux.errors import InputError


@click.command(cls=Command, examples=("auraflux rm qwen3:4b", "auraflux rm org/name org/other --yes"))
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--yes", "-y", is_flag=True, help="Delete without asking.")
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Delete downloaded models.

    NAME is one that `auraflux list` shows, or a short name. Files that were given by path are never deleted.
    """
    from auraflux.weights.download.local_models import files_nbytes, find_downloaded, remove

    for name in names:
        if find_downloaded(name) is None:
            raise InputError(f"there is no downloaded model {name[:200]!r}. 'auraflux list' lists those there are.")
    for name in names:
        nbytes = files_nbytes(name)
        if not yes and not _agreed(name, nbytes):
            click.echo(f"{name} was kept.", err=True)
            continue
        remove(name)
        click.echo(f"{name}: {size(nbytes)} freed.")


def _agreed(name: str, nbytes: int) -> bool:
    try:
        return click.confirm(f"Delete {name} ({size(nbytes)})?", err=True)
    except click.Abort as err:
        raise InputError("nobody answered, so nothing was deleted. --yes deletes without asking.") from err
