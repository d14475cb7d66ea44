"""`LoadedAdapters`: the adapters of a loaded model, chosen per request by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from auraflux.adapters.linears import AdaptedLayers
from auraflux.adapters.peft_folder import Adapter
from auraflux.errors import InputError, SettingsError
from auraflux.weights.formats.untrusted import listed, named


@dataclass(frozen=True, eq=False)
class LoadedAdapters:
    """The adapters of a model, numbered in the order of `adapters`."""

    adapters: Sequence[Adapter]
    layers: AdaptedLayers

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.adapters]

    @property
    def captures(self) -> bool:
        """Return whether steps with adapters are recorded: those of experts read on the host which experts were chosen."""
        return not self.layers.experts

    def check_touched(self) -> None:
        """Refuse adapters of weights that the step since the last call has not used as linear layers."""
        missing = {*self.layers.linears, *self.layers.experts} - self.layers.touched
        self.layers.touched.clear()
        if missing:
            names = sorted(self.layers.names[each] for each in missing)
            raise SettingsError(
                f"the adapters change {listed(names, 4)}, which this model does not compute as linear layers. "
                "Merge them into the model: auraflux convert --merge."
            )


def adapter_number(loaded: LoadedAdapters | None, name: str | None) -> int | None:
    """Return the number of an adapter by its name; None for the model without one."""
    if name is None:
        return None
    names = [] if loaded is None else loaded.names
    if name not in names:
        known = f"There are {listed(names)}." if names else "The model was loaded without adapters."
        raise InputError(f"there is no adapter {named(name)!r:.80}. {known}")
    return names.index(name)
