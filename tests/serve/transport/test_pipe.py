"""The pipe between the HTTP process and the model process."""

import asyncio
import multiprocessing
import os
import pickle
import struct
import threading
import time

import pytest

from auraflux.serve.transport.link import ModelFacts
from auraflux.serve.transport.pipe import READY, PipeLink

uvloop = pytest.importorskip("uvloop", reason="the server runs on it where there is one")


def test_message_in_several_reads():
    """A message larger than the pipe's buffer is received completely, and not mistaken for a closed pipe."""
    ours, theirs = multiprocessing.Pipe()
    facts = ModelFacts("m", "llama", context=8, vocab=9, eos_token_ids=frozenset({1}), kv="k8v4", device="cpu", max_sequences=1)
    stopped = []

    def send() -> None:
        message = pickle.dumps((READY, facts, None))
        os.write(ours.fileno(), struct.pack("!i", len(message)) + message[:10])
        time.sleep(0.1)
        os.write(ours.fileno(), message[10:])

    async def listen() -> PipeLink:
        link = PipeLink(theirs, waiting=1, on_stop=lambda: stopped.append(True))
        link.listen()
        sending = threading.Thread(target=send)
        sending.start()
        async with asyncio.timeout(10):
            while link.facts is None and not stopped:
                await asyncio.sleep(0.01)
        sending.join()
        assert not stopped
        link.close()
        return link

    with ours, theirs, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        link = runner.run(listen())
    assert link.facts == facts
