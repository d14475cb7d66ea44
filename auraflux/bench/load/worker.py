"""A process that sends requests: it prepares their bodies, waits for the common start, and returns the records."""

import asyncio
import gc
import time
from multiprocessing.connection import Connection as Pipe

from auraflux.bench.load.client import Client
from auraflux.bench.load.record import Record
from auraflux.bench.load.workload import Chain, Target, Work


def main(pipe: Pipe, target: Target) -> None:
    """Run rounds until the other end closes: (Work, chains) in, "ready" out, the start time in, the records out."""
    client = Client(target)
    with asyncio.Runner() as runner:
        try:
            while True:
                work, chains = pipe.recv()
                bodies = make_bodies(work, chains)
                # the collector would pause all clients of this process at once
                gc.collect()
                gc.disable()
                pipe.send("ready")
                records = runner.run(send_all(client, work, chains, bodies, pipe.recv()))
                gc.enable()
                pipe.send(records)
        except (EOFError, OSError):
            runner.run(client.close())


def make_bodies(work: Work, chains: list[Chain]) -> list[list[bytes]]:
    return [[work.body(name, chain.tokens) for name in chain.names] for chain in chains]


async def send_all(
    client: Client, work: Work, chains: list[Chain], bodies: list[list[bytes]], start: float
) -> list[list[Record]]:
    """Send all chains concurrently; return the records of each, in its order."""

    async def send(chain: Chain, own: list[bytes]) -> list[Record]:
        due, records = start + chain.delay_s, []
        await asyncio.sleep(due - time.monotonic())
        for body in own:
            records.append(await client.complete(body, chain.client, due, work.timeout_s))
            due = time.monotonic()
        return records

    return await asyncio.gather(*(send(chain, own) for chain, own in zip(chains, bodies, strict=True)))
