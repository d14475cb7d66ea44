"""Which of several kernels runs: a list of routes in order, of which the first that does not refuse a call is taken.

A table is all there is to know about the choice. `explain` goes through it without running anything, which is what
`auraflux ops --explain` and `docs/kernels.md` show. `leaving_out` runs what would be taken without some route, by which
`auraflux bench ops --routes` tells what that is worth.
"""

import importlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from auraflux.ops._dispatch import Declined, Op, is_invariant

DIFFERS = "its last bits depend on what else is in the call"
MOST_KNOWN = 4096  # calls whose routes a table remembers

Call = TypeVar("Call")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Route(Generic[Call, Result]):
    """One way to carry out a call.

    name     of the kernel, or what is done
    refuses  why the call is not for it, in a few words; None if it is
    run      carries the call out
    then     where it is done by other tables: those, and what they are called with
    alike    a token's result is the same whatever else is in the call, and by all such routes of a table: inside `invariant`
             no others are taken. Where none of a table is marked, all are so
    """

    name: str
    refuses: Callable[[Call], str | None]
    run: Callable[[Call], Result]
    then: Callable[[Call], "list[tuple[Routes[Any, Any], Any]]"] | None = None
    alike: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a table says of a call: the route that is taken, and why those above it were not.

    then  the verdicts of the tables that the route itself asks
    """

    taken: str | None
    refused: tuple[tuple[str, str], ...]
    then: tuple["Verdict", ...] = ()

    @property
    def path(self) -> str:
        """The routes that are taken, one inside the other."""
        inside = ", ".join(dict.fromkeys(verdict.path for verdict in self.then))
        return f"{self.taken} ({inside})" if inside else str(self.taken)


class _Told(Exception):
    """Carries a verdict out of a kernel that was asked for it instead of being run."""

    def __init__(self, verdict: Verdict):
        self.verdict = verdict


NONE: frozenset[str] = frozenset()
# in place of the usual way through a table; None for that
_asked: ContextVar[Callable[["Routes[Any, Any]", Any], Any] | None] = ContextVar("asked", default=None)


class Routes(Generic[Call, Result]):
    """The routes of one or more ops, the preferred first.

    key  gives of a call all that the routes' refusals look at: calls with one key take one route, which is remembered. It pays
         where a call goes through many refusals.
    """

    def __init__(self, *routes: Route[Call, Result], key: Callable[[Call], Hashable] | None = None):
        self.routes, self.key = routes, key
        self._known: dict[Hashable, Route[Call, Result]] = {}
        self._alike: dict[Hashable, Route[Call, Result]] = {}
        self._differ = any(route.alike for route in routes)

    def __call__(self, call: Call) -> Result:
        if (asked := _asked.get()) is not None:
            return asked(self, call)
        return (self.first(call) if self.key is None else self._remembered(self.key(call), call)).run(call)

    def first(self, call: Call, without: frozenset[str] = NONE) -> Route[Call, Result]:
        """The first route that does not refuse, and has none of some names."""
        alike = self._differ and is_invariant()
        for route in self.routes:
            if route.name not in without and (route.alike or not alike) and route.refuses(call) is None:
                return route
        reasons = [reason for _, reason in self.explain(call, without).refused]
        raise Declined(next((reason for reason in reversed(reasons) if reason != DIFFERS), reasons[-1]))

    def _remembered(self, key: Hashable, call: Call) -> Route[Call, Result]:
        known = self._alike if is_invariant() else self._known
        try:
            return known[key]
        except KeyError:
            if len(known) >= MOST_KNOWN:
                known.clear()
            return known.setdefault(key, self.first(call))

    def explain(self, call: Call, without: frozenset[str] = NONE) -> Verdict:
        """What would be done, without doing it; routes of some names are left out."""
        refused: list[tuple[str, str]] = []
        alike = self._differ and is_invariant()
        for route in self.routes:
            if alike and not route.alike:
                refused.append((route.name, DIFFERS))
                continue
            reason = "it is left out" if route.name in without else route.refuses(call)
            if reason is None:
                then = route.then(call) if route.then is not None else []
                return Verdict(route.name, tuple(refused), tuple(table.explain(inner, without) for table, inner in then))
            refused.append((route.name, reason))
        return Verdict(None, tuple(refused))

    def __iter__(self) -> Iterator[Route[Call, Result]]:
        return iter(self.routes)


def routes_of(op: Op, backend: str) -> Routes[Any, Any] | None:
    """The table that an op's kernel asks; None where it has no choice."""
    name = f"auraflux.ops.{op.family}.{backend}.routes"
    try:
        tables: dict[str, Routes[Any, Any]] = importlib.import_module(name).ROUTES
    except ModuleNotFoundError as err:
        # families without a choice have one module, or none of this name
        if err.name is None or not name.startswith(err.name):
            raise
        return None
    return tables.get(op.name)


def is_rerouted() -> bool:
    """Whether tables are asked for something else than the usual way through them."""
    return _asked.get() is not None


@contextmanager
def leaving_out(names: frozenset[str]) -> Iterator[None]:
    """Take no route of these names inside the block, whatever its table."""
    token = _asked.set(lambda table, call: table.first(call, names).run(call))
    try:
        yield
    finally:
        _asked.reset(token)


def verdict_of(op: Op, backend: str, arguments: dict[str, Any], without: frozenset[str] = NONE) -> Verdict | None:
    """What an op's table says of a call; None where there is no table, or nothing to do."""
    kernel = op.kernel(backend)
    if kernel is None or routes_of(op, backend) is None:
        return None

    def tell(table: Routes[Any, Any], call: Any) -> NoReturn:
        raise _Told(table.explain(call, without))

    token = _asked.set(tell)
    try:
        kernel(**arguments)
    except _Told as told:
        return told.verdict
    except Declined as reason:
        return Verdict(None, (("every kernel", str(reason)),))
    finally:
        _asked.reset(token)
    return None
