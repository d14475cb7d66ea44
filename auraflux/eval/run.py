"""An evaluation run: every setting on text, copies, needles, tool calls and speed. An interrupted run resumes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from auraflux.cache.key_calibration import ModelCalibration
from auraflux.engine.engine import Engine
from auraflux.eval.metrics import NONE, Differences, summary
from auraflux.eval.needle import DEPTHS, Haystack, recall
from auraflux.eval.scorer import EngineScorer, Scorer, differences
from auraflux.eval.setting import REFERENCE, Setting, cache_of, nbytes_at
from auraflux.eval.speed import DECODED_TOKENS, WARM_UP, speed
from auraflux.eval.state import State, digest
from auraflux.eval.text import Passage
from auraflux.eval.tools import CallResult, Conversation, score_calls, summarize_calls
from auraflux.weights.memory_plan import CONTEXTS

Report = Callable[[str, int, int], None]  # the task at hand, results so far, results in all


@dataclass(frozen=True)
class Tasks:
    """The tasks that every setting runs.

    windows  passages of text
    copies   by distance
    needles  by length, several haystacks each
    tools    conversations that end with tool calls, by length
    speeds   prompts to prefill before decode is timed, by length
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
    def names(self) -> list[str]:
        """Names under which results are stored."""
        passages = [passage.name for passage in self.passages]
        needles = [f"needle:{length}" for length in self.needles]
        calls = [tools_task(length, number) for length, found in self.tools.items() for number in range(len(found))]
        return [*passages, *calls, *needles, *(f"speed:{length}" for length in self.speeds)]

    @cached_property
    def digest(self) -> str:
        return digest(asdict(self))


def tools_task(length: int, number: int) -> str:
    """Return the name of one conversation's results."""
    return f"tools:{length}:{number}"


class Evaluation:
    """A run over settings.

    engine_for       returns an engine with weights quantized to these bits; None for no quantization
    calibration_for  returns its key calibration
    exact            use float32 activations for quality; speed is measured with the default kernels
    """

    def __init__(
        self,
        engine_for: Callable[[int | None], Engine],
        calibration_for: Callable[[int | None], ModelCalibration],
        settings: list[Setting],
        tasks: Tasks,
        state: State,
        exact: bool,
        report: Report,
    ):
        self.engine_for, self.calibration_for, self.tasks = engine_for, calibration_for, tasks
        self.state, self.exact, self.report = state, exact, report
        device, self._shapes = engine_for(None).device.type, engine_for(None).cache.shapes
        self.settings = [replace(setting, cache=setting.cache.for_device(device)) for setting in settings]
        self.caches = {setting.name: cache_of(setting, self._shapes) for setting in self.settings}

    def run(self) -> list[dict[str, Any]]:
        """Run the tasks without results; return one row per setting."""
        for bits in dict.fromkeys(setting.quantize for setting in self.settings):
            self._measure([setting for setting in self.settings if setting.quantize == bits])
        self._report("done")
        return [self._row(setting) for setting in self.settings]

    def _measure(self, settings: list[Setting]) -> None:
        self._passages(settings)
        self._tools(settings)
        for setting in settings:
            self._needles(setting)
            self._speeds(setting)

    def _passages(self, settings: list[Setting]) -> None:
        """Compare each setting with the uncompressed run."""
        context = max((len(passage.ids) for passage in self.tasks.passages), default=0)
        scorers: dict[str, Scorer] = {}
        for passage in self.tasks.passages:
            missing = [setting for setting in settings if (setting.name, passage.name) not in self.state]
            if not missing:
                continue
            self._report(passage.name)
            for setting in (REFERENCE, *missing):
                if setting.name not in scorers:
                    scorers[setting.name] = self._scorer(setting, context)
            chosen = {setting.name: scorers[setting.name] for setting in missing}
            for name, found in differences(scorers[REFERENCE.name], chosen, passage).items():
                self.state.add(name, passage.name, asdict(found))

    def _tools(self, settings: list[Setting]) -> None:
        """Compare tool calls with those of the uncompressed run."""
        for length, conversations in self.tasks.tools.items():
            scorers: dict[str, Scorer] = {}
            for number, conversation in enumerate(conversations):
                task = tools_task(length, number)
                missing = [setting for setting in settings if (setting.name, task) not in self.state]
                if not missing:
                    continue
                self._report(task)
                for setting in (REFERENCE, *missing):
                    if setting.name not in scorers:
                        scorers[setting.name] = self._scorer(setting, length)
                chosen = {setting.name: scorers[setting.name] for setting in missing}
                for name, found in score_calls(scorers[REFERENCE.name], chosen, conversation).items():
                    self.state.add(name, task, [asdict(each) for each in found])

    def _needles(self, setting: Setting) -> None:
        for length, haystacks in self.tasks.needles.items():
            task = f"needle:{length}"
            if (setting.name, task) in self.state:
                continue
            self._report(f"{setting.name}, {task}")
            longest = max(len(ending) for hidden in haystacks for endings in hidden.endings for ending in endings)
            scorer = self._scorer(setting, length + longest)
            self.state.add(setting.name, task, [recall(scorer, hidden) for hidden in haystacks])

    def _speeds(self, setting: Setting) -> None:
        # a simulated cache does not have the speed of its peer
        missing = {n: ids for n, ids in self.tasks.speeds.items() if (setting.name, f"speed:{n}") not in self.state}
        if setting.peer is not None or not missing:
            return
        scorer = self._scorer(setting, max(missing) + WARM_UP + DECODED_TOKENS, exact=False, graphs=True)
        for length, ids in missing.items():
            self._report(f"{setting.name}, speed:{length}")
            self.state.add(setting.name, f"speed:{length}", speed(scorer, ids))

    def _scorer(self, setting: Setting, context: int, exact: bool | None = None, graphs: bool = False) -> EngineScorer:
        base, shapes = self.engine_for(setting.quantize), setting.shapes(self._shapes)
        calibration = setting.calibration(lambda: self.calibration_for(setting.quantize))
        return EngineScorer(base, shapes, setting.cache, context, self.exact if exact is None else exact, graphs, calibration)

    def _report(self, what: str) -> None:
        keys = [(setting.name, task) for setting in self.settings for task in self.tasks.names]
        wanted = [key for key in keys if not key[1].startswith("speed:") or not self._simulated(key[0])]
        self.report(what, sum(key in self.state for key in wanted), len(wanted))

    def _simulated(self, name: str) -> bool:
        return any(setting.name == name and setting.peer is not None for setting in self.settings)

    def _row(self, setting: Setting) -> dict[str, Any]:
        cache, speeds = self.caches[setting.name], {}
        if setting.peer is None:
            speeds = {length: self.state[setting.name, f"speed:{length}"] for length in self.tasks.speeds}
        return {
            "setting": setting.name,
            "title": setting.title,
            "simulated": setting.peer is not None,
            "token_nbytes": cache.token_nbytes,
            "nbytes_at": {length: nbytes_at(cache, length) for length in CONTEXTS},
            "text": summary(self._found(setting, self.tasks.windows)),
            "copy": {distance: summary(self._found(setting, [each])) for distance, each in self.tasks.copies.items()},
            "needle": {length: self._recalled(setting, length) for length in self.tasks.needles},
            "tools": {length: self._called(setting, length) for length in self.tasks.tools},
            "speed": speeds,
        }

    def _found(self, setting: Setting, passages: list[Passage]) -> Differences:
        return sum((Differences(**self.state[setting.name, passage.name]) for passage in passages), NONE)

    def _called(self, setting: Setting, length: int) -> dict[str, Any]:
        tasks = [tools_task(length, number) for number in range(len(self.tasks.tools[length]))]
        found = [each for task in tasks for each in self.state[setting.name, task]]
        return summarize_calls([CallResult(each["name"], Differences(**each["differences"])) for each in found])

    def _recalled(self, setting: Setting, length: int) -> dict[str, Any]:
        """Return the mean probability of the right value, overall and by depth, and how often it is above one half."""
        found = np.array(self.state[setting.name, f"needle:{length}"])
        by_depth = dict(zip(map(str, DEPTHS), found.mean(0).tolist(), strict=True))
        return {"mean": float(found.mean()), "above_half": float((found > 0.5).mean()), "by_depth": by_depth}
