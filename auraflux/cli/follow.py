"""`auraflux follow`: a rank other than 0 of a model on several machines."""

import os

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_model
from auraflux.cli.options.model import hush_torch, timeout_option


@click.command(cls=Command)
@click.argument("address")
@click.argument("model")
@timeout_option
@click.option("--wire", default="here", hidden=True, help="Network to simulate: 10gbe, 1gbe or wifi.")
@click.option("--restart", is_flag=True, help="Join again when the group is lost, instead of exiting.")
def follow(address: str, model: str, rank_timeout: float, wire: str, restart: bool) -> None:
    """Run a rank of MODEL for another machine.

    Rank 0 waits at ADDRESS, such as 10.0.0.1:29400; this process exits when rank 0 does.
    MODEL must have the same files as on rank 0. Ranks trust each other and their network: use a private one.
    """
    hush_torch()
    check_model(model)
    from auraflux.distributed.comm.slow_link import find_link
    from auraflux.distributed.follower import follow as run_follower
    from auraflux.distributed.parallel import PORT, address_of

    run_follower(*address_of(address, PORT), model, timeout_s=rank_timeout, restart=restart, link=find_link(wire))
    # open connections would keep the process alive
    os._exit(0)
