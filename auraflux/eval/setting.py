"""Settings under evaluation: a KV cache format with optional changes, spelled as on the command line."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.errors import SettingsError
from auraflux.eval.peers import PEERS, Peer
from auraflux.eval.rounded import rounded_shapes
from auraflux.quant.affine import BITS

# the parts of key calibration that a setting uses
CALIBRATED = ("all", "off", "centres", "scales")


def _calibrated(value: str) -> str:
    if value not in CALIBRATED:
        raise ValueError(value)
    return value


CHANGES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("sink_tokens", "recent_window", "skip_first_layers", "skip_last_layers", "seed", "quantize"), int),
    "sparse_v": float,
    "calibrate": _calibrated,
}
NO_FULL_PRECISION = "sink_tokens=0+recent_window=0"
# without one default, or with more of it; then with one other option at a time
ABLATIONS = (
    *("sink_tokens=0", "recent_window=0", "recent_window=128", NO_FULL_PRECISION, f"{NO_FULL_PRECISION}+calibrate=off"),
    *(f"calibrate={used}" for used in CALIBRATED[1:]),
    *("skip_first_layers=2", "skip_last_layers=2", "sparse_v=0.0001", *(f"quantize={bits}" for bits in BITS[::-1])),
)


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    name       as spelled on the command line
    cache      settings of the KV cache
    quantize   bits that dense weights are quantized to; None for none
    calibrate  the parts of key calibration that are used, by default all
    peer       the engine whose cache is simulated inside an uncompressed one
    """

    name: str
    cache: CacheSettings
    quantize: int | None = None
    peer: Peer | None = None
    calibrate: str = CALIBRATED[0]

    def shapes(self, shapes: list[Any]) -> list[Any]:
        """Return the layer shapes of a model under this setting."""
        return shapes if self.peer is None else rounded_shapes(shapes, self.peer)

    def calibration(self, found: Callable[[], ModelCalibration]) -> ModelCalibration | None:
        """Return the key calibration that this setting uses."""
        if self.cache.kv == "none" or self.calibrate == "off":
            return None
        if self.calibrate == "all":
            return found()
        return found().means_only() if self.calibrate == "centres" else found().scales_only()

    @property
    def title(self) -> str:
        return self.name if self.peer is None else f"{self.peer.title} (simulated)"


def cache_of(setting: Setting, shapes: list[Any]) -> Cache:
    """Return a setting's cache without memory, 16 bits where it is not compressed; refuse what the layers cannot have."""
    return Cache(setting.shapes(shapes), setting.cache, context=1, dtype=torch.bfloat16, device="meta")


def nbytes_at(cache: Cache, length: int) -> int:
    """Return the bytes of one sequence of `length` tokens, with windows, full-precision tokens and recurrent states."""
    states = cache.states.slot_nbytes if cache.has_states else 0
    return states + sum(layer.nbytes_at(length) for layer in cache.layers)


REFERENCE = Setting("none", CacheSettings("none"))


def parse(name: str) -> Setting:
    """Parse a setting: none, a pair of bits or a peer, and changes to it, as in k4v4+recent_window=32+quantize=4."""
    base, *changes = name.split("+")
    given = dict(_change(name, change) for change in changes)
    quantize = given.pop("quantize", None)
    if quantize is not None and quantize not in BITS:
        raise SettingsError(
            f"{name}: weights cannot be quantized to {quantize} bits; those there are: {', '.join(map(str, BITS))}."
        )
    if base not in PEERS:
        if base != "none" and not (len(base) == 4 and base.startswith("k")):
            known = f"none, pairs of bits such as k8v4 or k4v4, {', '.join(PEERS)}"
            raise SettingsError(f"there is no setting {base!r}. Those there are: {known}.")
        calibrate = given.pop("calibrate", None)
        if base == "none" and calibrate is not None:
            raise SettingsError(f"{name}: calibrate has no effect on keys that are not quantized.")
        return Setting(name, CacheSettings(base, **given), quantize, calibrate=calibrate or CALIBRATED[0])
    strange = sorted(set(given) - {"recent_window"})
    if strange:
        raise SettingsError(f"{name}: {', '.join(strange)} cannot be simulated for {PEERS[base].title}; recent_window can.")
    return Setting(name, CacheSettings("none"), quantize, replace(PEERS[base], **given))


def _change(name: str, change: str) -> tuple[str, Any]:
    key, _, value = change.partition("=")
    if key not in CHANGES:
        raise SettingsError(f"{name}: there is no change {key!r}. Those there are: {', '.join(CHANGES)}.")
    try:
        return key, CHANGES[key](value)
    except ValueError:
        wanted = f"one of {', '.join(CALIBRATED)}" if key == "calibrate" else "a number"
        raise SettingsError(f"{name}: {key} needs {wanted}, not {value!r}.") from None


def parse_all(names: str, peers: bool, ablations: bool) -> list[Setting]:
    """Parse comma-separated settings; add all peers, and ablations of the first compressed one."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise SettingsError("no setting was given. Give some, such as --kv none,k8v4,k4v4.")
    found = [parse(name) for name in listed]
    if ablations:
        base = next((each for each in found if each.cache.kv != "none"), None)
        if base is None:
            raise SettingsError("--ablations changes a compressed cache, and --kv has none.")
        found += [parse(f"{base.name}+{change}") for change in ABLATIONS]
    if peers:
        found += [parse(name) for name in PEERS]
    return list({each.name: each for each in found}.values())
