"""Slots without processes: loading takes a moment, and a script plays the model."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from auraflux.serve.several.model_slot import LoadError, ModelSlot
from auraflux.serve.transport.link import ModelPlan
from tests.serve.fake_link import FakeLink, Script

GIB = 1 << 30


class World:
    """All slots of a test.

    events   names that were loaded and, after a minus, unloaded
    links    of the loaded models
    script   what models play
    broken   reasons why models cannot be loaded, by name
    most     the largest memory that was in use
    hold     set to let loading end
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.links: dict[str, FakeLink] = {}
        self.script: Script | str = "Hello there!"
        self.broken: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.most = 0
        self.load_s = 0.001
        self.hold: asyncio.Event | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "World":
        world = self

        async def open_slot(slot: Any, memory_nbytes: int) -> ModelPlan:
            await asyncio.sleep(world.load_s)
            name = slot.entry.name
            if name in world.broken:
                raise LoadError(world.broken[name])
            slot.plan = ModelPlan("cpu", slot.entry.settings.get("nbytes", GIB))
            return slot.plan

        async def load(slot: Any) -> None:
            from auraflux.serve.service import Service

            name = slot.entry.name
            world.sizes[name] = slot.plan.nbytes
            world.most = max(world.most, sum(world.sizes.values()))
            await asyncio.sleep(world.load_s)
            if world.hold is not None:
                await world.hold.wait()
            link = world.links[name] = FakeLink(world.script)
            assert link.facts is not None
            link.facts = replace(link.facts, name=name)
            slot._link = link
            slot._service = Service(link, slot._limits, aliases=slot.entry.aliases, tally=slot.tally)
            world.events.append(name)

        close = ModelSlot.close

        async def close_slot(slot: Any) -> None:
            if slot.is_loaded:
                world.events.append(f"-{slot.entry.name}")
            slot._link = None
            slot._service = None
            await asyncio.sleep(world.load_s)
            world.sizes.pop(slot.entry.name, None)
            await close(slot)

        functions: dict[str, Callable[..., Any]] = {"open": open_slot, "load": load, "close": close_slot}
        for name, function in functions.items():
            monkeypatch.setattr(ModelSlot, name, function)
        return self
