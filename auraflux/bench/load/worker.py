"""A process that sends requests: it makes them ready, waits for the common start, and tells what it saw."""

import asyncio
import gc
import time
from multiprocessing.connection import Connection as Pipe

from auraflux.bench.load.client import Client
from auraflux.bench.load.plan import Chain, Target, Work
from auraflux.bench.load.record import Record


def main(pipe: Pipe, target: Target) -> None:
    """Serve turns until the other end is closed: (Work, chains) comes, "ready" goes, the start comes, the records go."""
    client = Client(target)
    with asyncio.Runner() as runner:
        try:
            while True:
                work, chains = pipe.recv()
                bodies = make_bodies(work, chains)
                # the collector would stop all clients of this process at once
                gc.collect()
                gc.disable()
                pipe.send("ready")
                records = runner.run(send_all(client, work, chains, bodies, pipe.recv()))
                gc.enable()
                pipe.send(records)
        except (EOFError, OSError):
            client.close()
            # a connection is closed by its loop, in the next turn of that
            runner.run(asyncio.sleep(0))


def make_bodies(work: Work, chains: list[Chain]) -> list[list[bytes]]:
    return [[work.body(name, chain.tokens) for name in chain.names] for chain in chains]


async def send_all(
    client: Client, work: Work, chains: list[Chain], bodies: list[list[bytes]], start: float
) -> list[list[Record]]:
    """Send all chains side by side; the records of each, in its order."""

    async def send(chain: Chain, own: list[bytes]) -> list[Record]:
        due, records = start + chain.delay_s, []
        await asyncio.sleep(due - time.monotonic())
        for body in own:
            records.append(await client.ask(body, chain.client, due, work.timeout_s))
            due = time.monotonic()
        return records

    return await asyncio.gather(*(send(chain, own) for chain, own in zip(chains, bodies, strict=True)))
