"""`auraflux follow`: one of the processes or machines that run a model together."""

import os

import click

from auraflux.cli.options import hush_torch, timeout_option


@click.command()
@click.argument("address")
@click.argument("model")
@timeout_option
@click.option("--wire", default="here", hidden=True, help="A slower network to pretend: 10gbe, 1gbe or wifi.")
@click.option("--restart", is_flag=True, help="Join again when the group was lost, instead of ending.")
def follow(address: str, model: str, rank_timeout: float, wire: str, restart: bool) -> None:
    """Run a part of MODEL for another machine.

    That is rank 0, which waits at ADDRESS, such as 10.0.0.1:29400; this ends when it does.
    MODEL must hold the same files as rank 0's. Ranks trust each other and their network: use one that only they are on.
    """
    hush_torch()
    from auraflux.run.ranks.follow import follow as take_part
    from auraflux.run.ranks.parallel import PORT, address_of
    from auraflux.run.ranks.wire import find_wire

    take_part(*address_of(address, PORT), model, timeout_s=rank_timeout, restart=restart, wire=find_wire(wire))
    # connections that are waited on would keep the process
    os._exit(0)
