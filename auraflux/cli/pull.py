"""`auraflux pull`: download a model and print its path."""

import os

import click


@click.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Download a model and print its path.

    NAME is a repository on the Hugging Face hub (org/name, org/name@revision, or org/name/file.gguf) or a built-in name.
    Without it, SmolLM2-135M-Instruct is downloaded. Files that are already here are not downloaded again. All files are of
    one commit, and are checked against the hashes of the hub.
    """
    from auraflux.progress import on_terminal
    from auraflux.weights.download.pull import locate

    with on_terminal() as report:
        path = locate(name, report)
    # as bytes: a file name need not be valid text
    click.echo(os.fsencode(path))
