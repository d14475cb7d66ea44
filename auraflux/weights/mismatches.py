"""`Mismatches`: tensors of a checkpoint that do not fit the model, for one error about all of them."""

from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.formats.untrusted import listed, shown

SHOWN = 4  # tensors of a kind in an error message
WIDEST = 150  # characters for each of them
MOST_MISSING = 10_000  # missing tensors after which loading stops


class Mismatches:
    """Missing and mis-shaped tensors of a checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def add_missing(self, name: str) -> None:
        """Record a missing tensor; raise if there are too many, since a config may claim any number of experts."""
        self._missing.append(name)
        if len(self._missing) > MOST_MISSING:
            many = listed(self._missing, SHOWN, WIDEST)
            raise FormatError(f"the tensors in {self.path} do not fit the model. Too many are missing: {many}.")

    def add(self, reason: str) -> None:
        """Record why a tensor does not fit."""
        self._wrong.append(reason)

    def check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
        """Return whether a tensor has a shape, where None stands for any size; record it otherwise."""
        if len(found) == len(wanted) and all(want in (None, have) for want, have in zip(wanted, found, strict=True)):
            return True
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        self.add(f"{name} has shape {shown(list(found))}, [{sizes}] is needed")
        return False

    def raise_all(self, unexpected: list[str]) -> None:
        """Raise one error about all that was recorded and about unexpected tensors, if there are any."""
        kinds = [
            (sorted(set(self._missing)), "missing"),
            (list(dict.fromkeys(self._wrong)), "of the wrong shape"),
            (sorted(unexpected), "that the model does not know"),
        ]
        reasons = [f"{len(names)} {what}: {listed(names, SHOWN, WIDEST)}" for names, what in kinds if names]
        if reasons:
            raise FormatError(f"the tensors in {self.path} do not fit the model. {'; '.join(reasons)}.")
