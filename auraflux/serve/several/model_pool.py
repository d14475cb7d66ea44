"""`ModelPool`: decides which models of a catalog are loaded."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request

from auraflux.serve.failures import Failure, not_ready
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.serve.leases import lease
from auraflux.serve.limits import Limits
from auraflux.serve.listing import KeepAlive, Listing
from auraflux.serve.metrics import PREFIX, Metrics, ModelMetrics
from auraflux.serve.service import Service
from auraflux.serve.several.catalog import Catalog
from auraflux.serve.several.descriptions import Descriptions
from auraflux.serve.several.model_slot import LoadError, ModelSlot, Start, still_loading
from auraflux.serve.several.signal import Signal
from auraflux.serve.transport.link import Gauges, ModelPlan

log = logging.getLogger("auraflux.serve")
KEEP_ALIVE_S = 300.0
LOAD_TIMEOUT_S = 120.0
# a busy model serves on for so long while another waits for its memory
TURN_S = 5.0
# a model that could not be loaded is not tried again sooner
RETRY_S = 5.0
FINAL = {"x-should-retry": "false"}


class ModelPool:
    """Models that are loaded when requests name them, within an amount of memory, and unloaded least recently used first.

    memory_nbytes  for all loaded models
    draining       whether the server is stopping
    """

    def __init__(self, catalog: Catalog, start: Start, memory_nbytes: int, limits: Limits, max_queue: int):
        self.limits, self.memory_nbytes, self.created = limits, memory_nbytes, int(time.time())
        self.draining, self._max_waiting = False, max_queue
        self._keep_alive_s = KEEP_ALIVE_S if catalog.keep_alive_s is None else catalog.keep_alive_s
        self._timeout_s = catalog.load_timeout_s or LOAD_TIMEOUT_S
        self._changed = Signal()
        self._slots = [ModelSlot(entry, start, limits, max_queue, self._changed.notify) for entry in catalog.entries]
        self._by_name = {name: slot for slot in self._slots for name in slot.names}
        self._failures: dict[str, tuple[float, Failure]] = {}
        self._descriptions = Descriptions(catalog.entries)
        # one model is loaded at a time, in the order of the first requests
        self._loading = asyncio.Lock()
        self._loads = self._unloads = 0
        self._watching: asyncio.Task[None] | None = None
        self.metrics = Metrics(self._model_metrics, self._own_metrics)

    def start(self) -> None:
        """Load the pinned models, and begin to unload models that nobody uses."""
        self._watching = asyncio.ensure_future(self._watch())
        for slot in self._slots:
            if slot.entry.pinned:
                self._begin(slot)

    def check_ready(self) -> None:
        """Raise Failure 503 while the server stops, or a pinned model is not loaded."""
        if self.draining:
            raise not_ready("The server is stopping.")
        for slot in self._slots:
            if slot.entry.pinned and not slot.is_open:
                failed = self._failures.get(slot.entry.name)
                raise failed[1] if failed else not_ready(f"The model {slot.entry.name} is being loaded; try again soon.")

    def knows(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> ModelSlot | None:
        """Return the model of a name or an alias, also with Ollama's tag."""
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))

    def _slot(self, name: str | None) -> ModelSlot:
        if not name and len(self._slots) == 1:
            return self._slots[0]
        # "model:part" names something that the model serves under its own name; only the loaded model knows what
        found = (self._find(name) or self._by_name.get(name.rpartition(":")[0])) if name else None
        if found is not None:
            return found
        names = ", ".join(slot.entry.name for slot in self._slots)
        if not name:
            raise Failure(400, f"Name a model in 'model'. The models: {names}.", code="model_missing", param="model")
        message = f"The model {name[:200]!r} is not served here. The served models: {names}."
        raise Failure(404, message, code="model_not_found", param="model")

    async def select(self, request: Request, name: str | None, keep_alive: KeepAlive = None) -> Service:
        """Return the service of a model once it is loaded; queue while it is not."""
        seconds, slot = parse_keep_alive(keep_alive), self._slot(name)
        if slot.use.waiting + slot.use.running >= self._max_waiting:
            message = f"{slot.use.waiting} requests wait for the model {slot.entry.name}; try again later."
            raise Failure(429, message, code="queue_full", headers={"retry-after": "1"})
        slot.use.waiting += 1
        try:
            await self._until_open(slot)
        finally:
            slot.use.waiting -= 1
        slot.service.check_model(name)
        slot.use.running += 1
        slot.use.expires, slot.use.last = math.inf, self._now()
        if seconds is not None:
            slot.use.keep_alive_s = seconds
        lease(request, lambda: self._release(slot))
        return slot.service.for_model(name)

    async def _until_open(self, slot: ModelSlot) -> None:
        end = self._now() + self._timeout_s
        while True:
            if self.draining:
                raise not_ready("The server is stopping.")
            if slot.is_open:
                return
            failed_at, failure = self._failures.get(slot.entry.name, (-math.inf, None))
            if failure is not None and self._now() - failed_at < RETRY_S:
                raise failure
            self._begin(slot)
            if not await self._changed.wait(end - self._now()):
                raise still_loading(slot.entry.name, self._timeout_s)

    def _release(self, slot: ModelSlot) -> None:
        use = slot.use
        use.running -= 1
        use.last = self._now()
        if not use.running:
            use.expires = math.inf if slot.entry.pinned else use.last + self._kept_s(slot)
        self._changed.notify()

    def _kept_s(self, slot: ModelSlot) -> float:
        given = (slot.use.keep_alive_s, slot.entry.keep_alive_s)
        return next((seconds for seconds in given if seconds is not None), self._keep_alive_s)

    def _begin(self, slot: ModelSlot) -> None:
        """Begin to load a model, unless that has begun."""
        if slot.task is None and not slot.granted:
            slot.task = asyncio.ensure_future(self._load(slot))

    async def _load(self, slot: ModelSlot) -> None:
        name, started = slot.entry.name, self._now()
        try:
            async with self._loading:
                plan = await slot.open(self.memory_nbytes)
                await self._make_room(slot, plan)
                slot.granted = True
                await slot.load()
            slot.use.last = self._now()
            slot.use.expires = math.inf if slot.entry.pinned else slot.use.last + self._kept_s(slot)
            self._loads += 1
            self._failures.pop(name, None)
            log.info("loaded %s in %.1f s: %.2f GB on %s", name, self._now() - started, plan.nbytes / 1e9, plan.device)
        except Exception as err:
            await self._failed(slot, err)
        finally:
            slot.task = None
            self._changed.notify()

    async def _failed(self, slot: ModelSlot, err: Exception) -> None:
        name = slot.entry.name
        if isinstance(err, Failure):
            failure = err
        else:
            reason = str(err) if isinstance(err, LoadError) else "an unexpected error; the server's log has it."
            failure = Failure(
                503, f"The model {name} cannot be loaded: {reason}", code="not_ready", headers={"retry-after": "5"}
            )
        log.error(
            "%s was not loaded: %s", name, failure.message, exc_info=None if isinstance(err, LoadError | Failure) else err
        )
        self._failures[name] = self._now(), failure
        await slot.close()

    async def _make_room(self, slot: ModelSlot, plan: ModelPlan) -> None:
        """Unload models until one fits: idle ones, then those whose turn is over; never pinned ones."""
        limit = self.memory_nbytes if plan.limit is None else plan.limit
        self._check_fits(slot, plan, limit)
        turn_ends = self._now() + TURN_S
        try:
            while self._used(plan.device) + plan.nbytes > limit:
                others = [each for each in self._slots if self._may_leave(each, plan.device)]
                idle = [each for each in others if each.is_idle]
                if idle:
                    await self._unload(min(idle, key=lambda each: (not each.leaving, each.use.last)))
                    continue
                if self.draining or not (slot.use.waiting or slot.entry.pinned):
                    raise not_ready(f"The model {slot.entry.name} was not loaded: nobody waits for it any more.")
                if self._now() >= turn_ends and others and not any(each.leaving for each in others):
                    min(others, key=lambda each: each.use.last).leaving = True
                await self._changed.wait(1.0)
        finally:
            for each in self._slots:
                each.leaving = False

    def _may_leave(self, slot: ModelSlot, device: str) -> bool:
        return slot.is_loaded and not slot.entry.pinned and slot.plan is not None and slot.plan.device == device

    def _check_fits(self, slot: ModelSlot, plan: ModelPlan, limit: int) -> None:
        """Refuse a model that will not fit next to the pinned ones."""
        pinned = [each for each in self._slots if each.entry.pinned and each.granted and each is not slot and each.plan]
        left = limit - sum(each.plan.nbytes for each in pinned if each.plan and each.plan.device == plan.device)
        if plan.nbytes > left:
            taken = f" next to {', '.join(each.entry.name for each in pinned)}" if pinned else ""
            message = (
                f"The model {slot.entry.name} needs {plan.nbytes / 1e9:.2f} GB on {plan.device}, and {left / 1e9:.2f} GB are "
                f"for models{taken}. Give --models-memory more, or the model a smaller context or cache-memory."
            )
            raise Failure(503, message, code="no_memory", headers=FINAL)

    def _used(self, device: str) -> int:
        plans = [each.plan for each in self._slots if each.granted and each.plan is not None]
        return sum(plan.nbytes for plan in plans if plan.device == device)

    async def _unload(self, slot: ModelSlot) -> None:
        log.info("unloading %s", slot.entry.name)
        # requests that arrive meanwhile wait
        slot.leaving = True
        await slot.close()
        self._unloads += 1
        self._changed.notify()

    async def unload(self, name: str) -> bool:
        slot = self._slot(name)
        if slot.entry.pinned:
            return False
        slot.use.keep_alive_s = 0.0
        if slot.is_loaded and not slot.use.running:
            slot.use.expires = self._now()
        self._changed.notify()
        return True

    async def _watch(self) -> None:
        """Unload models that nobody used for as long as they were to stay, and those whose process has ended."""
        while True:
            now = self._now()
            for slot in self._slots:
                if slot.has_ended:
                    log.error("the process of %s has ended by itself", slot.entry.name)
                    await self._unload(slot)
                elif slot.is_idle and slot.use.expires <= now:
                    await self._unload(slot)
            soonest = min((slot.use.expires for slot in self._slots if slot.is_loaded), default=math.inf)
            await self._changed.wait(min(max(soonest - now, 0.0), 60.0))

    async def listings(self) -> list[Listing]:
        return [await self._listing(slot) for slot in self._slots]

    async def listing(self, name: str) -> Listing:
        return await self._listing(self._slot(name))

    async def _listing(self, slot: ModelSlot) -> Listing:
        name = slot.entry.name
        described = Listing(name, "unknown", None) if slot.is_loaded else await self._descriptions.of(slot.entry)
        return slot.listing(self._now(), described)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and let the models finish the running ones."""
        self.draining = True
        self._changed.notify()
        await asyncio.gather(*(slot.service.drain(grace_s) for slot in self._slots if slot.is_loaded))

    async def close(self) -> None:
        """Unload all models."""
        self.draining = True
        tasks = [task for task in (self._watching, *(slot.task for slot in self._slots)) if task is not None]
        for task in tasks:
            task.cancel()
        # closing first ends what the tasks wait for
        await asyncio.gather(*(slot.close() for slot in self._slots))
        await asyncio.gather(*tasks, return_exceptions=True)
        self._descriptions.close()

    def _model_metrics(self) -> Iterator[ModelMetrics]:
        for slot in self._slots:
            gauges = slot.service.link.gauges if slot.is_loaded else Gauges()
            yield ModelMetrics(slot.entry.name, slot.tally, gauges)

    def _own_metrics(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(f"{PREFIX}model_loaded", "1 while a model is loaded.", labels=["model_name"])
        memory = GaugeMetricFamily(f"{PREFIX}model_memory_bytes", "Memory planned for a loaded model.", labels=["model_name"])
        for slot in self._slots:
            loaded.add_metric([slot.entry.name], float(slot.is_loaded))
            memory.add_metric([slot.entry.name], slot.plan.nbytes if slot.granted and slot.plan else 0)
        yield from (loaded, memory)
        yield CounterMetricFamily(f"{PREFIX}model_loads", "Models loaded.", value=self._loads)
        yield CounterMetricFamily(f"{PREFIX}model_unloads", "Models unloaded.", value=self._unloads)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
