"""What is measured: a way to keep keys and values, with or without changes, spelled as on the command line."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from auraflux.cache import CacheSettings
from auraflux.cache.calibration import ModelVectors
from auraflux.errors import SettingsError
from auraflux.eval.peers import PEERS, Peer
from auraflux.eval.rounded import rounded_shapes
from auraflux.quant.affine import BITS

# of what is known of a model's keys: what is used
CALIBRATED = ("all", "off", "centres", "scales")


def _calibrated(value: str) -> str:
    if value not in CALIBRATED:
        raise ValueError(value)
    return value


CHANGES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("first", "newest", "protect_first", "protect_last", "seed", "quantize"), int),
    "sparse_v": float,
    "calibrate": _calibrated,
}
NOTHING_KEPT = "first=0+newest=0"
# without one thing that is usual, or more of it; then with one of the rest at a time
ABLATIONS = (
    *("first=0", "newest=0", "newest=128", NOTHING_KEPT, f"{NOTHING_KEPT}+calibrate=off"),
    *(f"calibrate={used}" for used in CALIBRATED[1:]),
    *("protect_first=2", "protect_last=2", "sparse_v=0.0001", *(f"quantize={bits}" for bits in BITS[::-1])),
)


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    name      as it was spelled
    cache     how the cache is kept
    quantize  bits to which dense weights are rounded; None as they are
    calibrate  what is used of what is known of the model's keys; usually all
    peer      whose cache is simulated instead, in an uncompressed one
    """

    name: str
    cache: CacheSettings
    quantize: int | None = None
    peer: Peer | None = None
    calibrate: str = CALIBRATED[0]

    def shapes(self, shapes: list[Any]) -> list[Any]:
        """The layers of a model as this setting wants them."""
        return shapes if self.peer is None else rounded_shapes(shapes, self.peer)

    def vectors(self, found: Callable[[], ModelVectors]) -> ModelVectors | None:
        """Those of the model's keys that this setting uses, of all that are found."""
        if self.cache.kv == "none" or self.calibrate == "off":
            return None
        if self.calibrate == "all":
            return found()
        return found().centres_only() if self.calibrate == "centres" else found().scales_only()

    @property
    def title(self) -> str:
        return self.name if self.peer is None else f"{self.peer.title} (simulated)"


REFERENCE = Setting("none", CacheSettings("none"))


def parse(name: str) -> Setting:
    """Read a setting: none, a pair of bits or a peer, and changes to it, as in k4v4+newest=32+quantize=4."""
    kept, *changes = name.split("+")
    given = dict(_change(name, change) for change in changes)
    quantize = given.pop("quantize", None)
    if quantize is not None and quantize not in BITS:
        raise SettingsError(
            f"{name}: weights cannot be rounded to {quantize} bits; those there are: {', '.join(map(str, BITS))}."
        )
    if kept not in PEERS:
        if kept != "none" and not (len(kept) == 4 and kept.startswith("k")):
            known = f"none, pairs of bits such as k8v4 or k4v4, {', '.join(PEERS)}"
            raise SettingsError(f"there is no setting {kept!r}. Those there are: {known}.")
        calibrate = given.pop("calibrate", None)
        if kept == "none" and calibrate is not None:
            raise SettingsError(f"{name}: calibrate means nothing where keys are not coded.")
        return Setting(name, CacheSettings(kept, **given), quantize, calibrate=calibrate or CALIBRATED[0])
    strange = sorted(set(given) - {"newest"})
    if strange:
        raise SettingsError(f"{name}: {', '.join(strange)} cannot be simulated for {PEERS[kept].title}; newest can.")
    return Setting(name, CacheSettings("none"), quantize, replace(PEERS[kept], **given))


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
    """Read settings with commas between them; add all peers, and the first compressed one with one thing changed at a time."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise SettingsError("no setting was given. Give some, such as --kv none,k8v4,k4v4.")
    found = [parse(name) for name in listed]
    if ablations:
        plain = next((each for each in found if each.cache.kv != "none"), None)
        if plain is None:
            raise SettingsError("--ablations changes a compressed cache, and --kv has none.")
        found += [parse(f"{plain.name}+{change}") for change in ABLATIONS]
    if peers:
        found += [parse(name) for name in PEERS]
    return list({each.name: each for each in found}.values())
