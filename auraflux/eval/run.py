"""Measuring every setting: texts, copies, needles, calls of functions, speed. What is done is kept for a run that goes on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from auraflux.cache.calibration import ModelVectors
from auraflux.eval.memory import cache_of, nbytes_at
from auraflux.eval.metrics import NONE, Differences, summary
from auraflux.eval.needle import DEPTHS, Haystack, recall
from auraflux.eval.reader import EngineReader, Reader, differences
from auraflux.eval.setting import REFERENCE, Setting
from auraflux.eval.speed import WARM_UP, WRITTEN, speed
from auraflux.eval.state import State, digest
from auraflux.eval.text import Passage
from auraflux.eval.tools import Called, Conversation, called, summed
from auraflux.run.engine import Engine
from auraflux.weights.plan import CONTEXTS

Tell = Callable[[str, int, int], None]  # what is measured, and how many of how many results are there


@dataclass(frozen=True)
class Plan:
    """What is measured of every setting.

    windows  of text
    copies   by distance
    needles  by length, several texts each
    tools    conversations that end with calls of functions, by length
    speeds   texts to read before writing is timed, by length
    """

    windows: list[Passage]
    copies: dict[int, Passage] = field(default_factory=dict)
    needles: dict[int, list[Haystack]] = field(default_factory=dict)
    tools: dict[int, list[Conversation]] = field(default_factory=dict)
    speeds: dict[int, list[int]] = field(default_factory=dict)

    @property
    def passages(self) -> list[Passage]:
        return [*self.windows, *self.copies.values()]

    @property
    def tasks(self) -> list[str]:
        """The names under which results are kept."""
        passages = [passage.name for passage in self.passages]
        asked = [f"needle:{length}" for length in self.needles]
        calls = [tools_task(length, number) for length, found in self.tools.items() for number in range(len(found))]
        return [*passages, *calls, *asked, *(f"speed:{length}" for length in self.speeds)]

    @cached_property
    def digest(self) -> str:
        return digest(asdict(self))


def tools_task(length: int, number: int) -> str:
    """The name of one conversation's results."""
    return f"tools:{length}:{number}"


class Evaluation:
    """A run over settings.

    bases    gives an engine whose weights are rounded to so many bits, or are as they are
    vectors  gives those of its keys
    exact    multiply float32 activations where quality is measured; speed is that of the usual kernels
    """

    def __init__(
        self,
        bases: Callable[[int | None], Engine],
        vectors: Callable[[int | None], ModelVectors],
        settings: list[Setting],
        plan: Plan,
        state: State,
        exact: bool,
        tell: Tell,
    ):
        self.bases, self.vectors, self.settings, self.plan = bases, vectors, settings, plan
        self.state, self.exact, self.tell = state, exact, tell
        self._shapes = bases(None).cache.shapes
        self.caches = {setting.name: cache_of(setting, self._shapes) for setting in settings}

    def run(self) -> list[dict[str, Any]]:
        """Measure what is not there yet: one row for each setting."""
        for bits in dict.fromkeys(setting.quantize for setting in self.settings):
            self._measure([setting for setting in self.settings if setting.quantize == bits])
        self._say("done")
        return [self._row(setting) for setting in self.settings]

    def _measure(self, settings: list[Setting]) -> None:
        self._passages(settings)
        self._tools(settings)
        for setting in settings:
            self._needles(setting)
            self._speeds(setting)

    def _passages(self, settings: list[Setting]) -> None:
        """Compare with the uncompressed run, all settings side by side."""
        context = max((len(passage.ids) for passage in self.plan.passages), default=0)
        readers: dict[str, Reader] = {}
        for passage in self.plan.passages:
            missing = [setting for setting in settings if (setting.name, passage.name) not in self.state]
            if not missing:
                continue
            self._say(passage.name)
            for setting in (REFERENCE, *missing):
                if setting.name not in readers:
                    readers[setting.name] = self._reader(setting, context)
            chosen = {setting.name: readers[setting.name] for setting in missing}
            for name, found in differences(readers[REFERENCE.name], chosen, passage).items():
                self.state.add(name, passage.name, asdict(found))

    def _tools(self, settings: list[Setting]) -> None:
        """Compare calls with those of the uncompressed run, all settings side by side."""
        for length, asked in self.plan.tools.items():
            readers: dict[str, Reader] = {}
            for number, conversation in enumerate(asked):
                task = tools_task(length, number)
                missing = [setting for setting in settings if (setting.name, task) not in self.state]
                if not missing:
                    continue
                self._say(task)
                for setting in (REFERENCE, *missing):
                    if setting.name not in readers:
                        readers[setting.name] = self._reader(setting, length)
                chosen = {setting.name: readers[setting.name] for setting in missing}
                for name, found in called(readers[REFERENCE.name], chosen, conversation).items():
                    self.state.add(name, task, [asdict(each) for each in found])

    def _needles(self, setting: Setting) -> None:
        for length, texts in self.plan.needles.items():
            task = f"needle:{length}"
            if (setting.name, task) in self.state:
                continue
            self._say(f"{setting.name}, {task}")
            longest = max(len(ending) for hidden in texts for endings in hidden.endings for ending in endings)
            reader = self._reader(setting, length + longest)
            self.state.add(setting.name, task, [recall(reader, hidden) for hidden in texts])

    def _speeds(self, setting: Setting) -> None:
        # a simulated cache says nothing of a peer's speed
        missing = {n: ids for n, ids in self.plan.speeds.items() if (setting.name, f"speed:{n}") not in self.state}
        if setting.peer is not None or not missing:
            return
        reader = self._reader(setting, max(missing) + WARM_UP + WRITTEN, exact=False, graphs=True)
        for length, ids in missing.items():
            self._say(f"{setting.name}, speed:{length}")
            self.state.add(setting.name, f"speed:{length}", speed(reader, ids))

    def _reader(self, setting: Setting, context: int, exact: bool | None = None, graphs: bool = False) -> EngineReader:
        base, shapes = self.bases(setting.quantize), setting.shapes(self._shapes)
        vectors = setting.vectors(lambda: self.vectors(setting.quantize))
        return EngineReader(base, shapes, setting.cache, context, self.exact if exact is None else exact, graphs, vectors)

    def _say(self, what: str) -> None:
        keys = [(setting.name, task) for setting in self.settings for task in self.plan.tasks]
        wanted = [key for key in keys if not key[1].startswith("speed:") or not self._simulated(key[0])]
        self.tell(what, sum(key in self.state for key in wanted), len(wanted))

    def _simulated(self, name: str) -> bool:
        return any(setting.name == name and setting.peer is not None for setting in self.settings)

    def _row(self, setting: Setting) -> dict[str, Any]:
        cache, speeds = self.caches[setting.name], {}
        if setting.peer is None:
            speeds = {length: self.state[setting.name, f"speed:{length}"] for length in self.plan.speeds}
        return {
            "setting": setting.name,
            "title": setting.title,
            "simulated": setting.peer is not None,
            "token_nbytes": cache.token_nbytes,
            "nbytes_at": {length: nbytes_at(cache, length) for length in CONTEXTS},
            "text": summary(self._found(setting, self.plan.windows)),
            "copy": {distance: summary(self._found(setting, [each])) for distance, each in self.plan.copies.items()},
            "needle": {length: self._recalled(setting, length) for length in self.plan.needles},
            "tools": {length: self._called(setting, length) for length in self.plan.tools},
            "speed": speeds,
        }

    def _found(self, setting: Setting, passages: list[Passage]) -> Differences:
        return sum((Differences(**self.state[setting.name, passage.name]) for passage in passages), NONE)

    def _called(self, setting: Setting, length: int) -> dict[str, Any]:
        tasks = [tools_task(length, number) for number in range(len(self.plan.tools[length]))]
        found = [each for task in tasks for each in self.state[setting.name, task]]
        return summed([Called(each["name"], Differences(**each["differences"])) for each in found])

    def _recalled(self, setting: Setting, length: int) -> dict[str, Any]:
        """The mean probability of the right value, over all and by depth, and how often it is above one half."""
        found = np.array(self.state[setting.name, f"needle:{length}"])
        by_depth = dict(zip(map(str, DEPTHS), found.mean(0).tolist(), strict=True))
        return {"mean": float(found.mean()), "above_half": float((found > 0.5).mean()), "by_depth": by_depth}
