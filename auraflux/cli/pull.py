"""`auraflux pull`: fetch a model and say where it is."""

import os

import click


@click.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Fetch a model and print its path.

    NAME is a repository on the Hugging Face hub (org/name, org/name@revision, or org/name/file.gguf) or a built-in name; with
    none, the built-in default is fetched, SmolLM2-135M-Instruct. What is already here is not fetched again. All files are of
    one commit, and are held against the hashes that the hub has of them.
    """
    from auraflux.run.progress import on_terminal
    from auraflux.weights.pull import locate

    with on_terminal() as report:
        path = locate(name, report)
    # as it is: a name need not be text
    click.echo(os.fsencode(path))
