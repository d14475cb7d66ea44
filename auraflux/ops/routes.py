"""Route tables: ordered lists of kernels, of which the first that does not refuse a call runs.

A table alone decides. `explain` walks it without running anything, for `auraflux ops --explain` and `docs/kernels.md`.
`without_routes` excludes routes, so that `auraflux bench ops --routes` can measure what each is worth. A route whose kernel
does not compile for the GPU is excluded from then on, with a logged reason, and the next one runs.
"""

import importlib
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from auraflux.ops._dispatch import Declined, Op, is_invariant, without_call_cache
from auraflux.ops.route_speed import RouteSpeed

log = logging.getLogger("auraflux")

NOT_INVARIANT = "not batch-invariant"
# Triton's errors where ptxas refuses a kernel, or it asks for more registers or shared memory than there are
NOT_COMPILED = ("PTXASError", "OutOfResources")
MOST_CACHED = 4096  # calls whose routes a table caches

Call = TypeVar("Call")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Route(Generic[Call, Result]):
    """One way to execute a call.

    name       of the kernel or the method
    refuses    returns why the route does not support a call, in a few words; None if it does
    run        executes the call
    then       returns the other tables that the route calls, with their calls
    invariant  batch-invariant, with the same result as all such routes of the table: inside `invariant` no others are taken.
               A table without any such mark is batch-invariant as a whole
    speed      rough speed, for routes that multiply by weights
    """

    name: str
    refuses: Callable[[Call], str | None]
    run: Callable[[Call], Result]
    then: Callable[[Call], "list[tuple[Routes[Any, Any], Any]]"] | None = None
    invariant: bool = False
    speed: RouteSpeed | None = None


@dataclass(frozen=True)
class Explanation:
    """Decision of a route table on a call.

    taken    name of the route that runs; None if all refuse
    refused  names of the routes before it, each with its reason
    then     decisions of the tables that the route itself calls
    """

    taken: str | None
    refused: tuple[tuple[str, str], ...]
    then: tuple["Explanation", ...] = ()

    @property
    def path(self) -> str:
        """Names of the routes that run, nested ones in brackets."""
        inside = ", ".join(dict.fromkeys(verdict.path for verdict in self.then))
        return f"{self.taken} ({inside})" if inside else str(self.taken)


class _Explained(Exception):
    """Carries an explanation out of a kernel in place of running it."""

    def __init__(self, verdict: Explanation):
        self.verdict = verdict


NONE: frozenset[str] = frozenset()
# replaces the call of a table; None for the normal call
_override: ContextVar[Callable[["Routes[Any, Any]", Any], Any] | None] = ContextVar("override", default=None)


class Routes(Generic[Call, Result]):
    """Route table of one or more ops, the preferred route first.

    key  returns all properties of a call that refusals depend on: the route is cached by it. Worth it where calls pass many
         refusals.
    """

    def __init__(self, *routes: Route[Call, Result], key: Callable[[Call], Hashable] | None = None):
        self.routes, self.key = routes, key
        self._cached: dict[Hashable, Route[Call, Result]] = {}
        self._cached_invariant: dict[Hashable, Route[Call, Result]] = {}
        self._has_variant = any(route.invariant for route in routes)
        self._not_compiled: dict[str, str] = {}

    def __call__(self, call: Call) -> Result:
        if (override := _override.get()) is not None:
            return override(self, call)
        key = None if self.key is None else self.key(call)
        while True:
            route = self.first(call) if self.key is None else self._lookup(key, call)
            try:
                return route.run(call)
            except Exception as err:
                if type(err).__name__ not in NOT_COMPILED:
                    raise
                self._exclude(route.name, err)

    def _exclude(self, name: str, err: Exception) -> None:
        """Take a route out of the table: its kernel does not compile."""
        what = [line.strip() for line in str(err).splitlines() if "error" in line or "resource" in line]
        self._not_compiled[name] = f"its kernel does not compile: {(what or [type(err).__name__])[-1]}"
        log.warning("route %s: %s; the next route runs instead", name, self._not_compiled[name])
        self._cached.clear()
        self._cached_invariant.clear()

    def first(self, call: Call, without: frozenset[str] = NONE) -> Route[Call, Result]:
        """Return the first route that does not refuse, excluding those named in `without`."""
        invariant = self._has_variant and is_invariant()
        for route in self.routes:
            if route.name in without or route.name in self._not_compiled or (invariant and not route.invariant):
                continue
            if route.refuses(call) is None:
                return route
        reasons = [reason for _, reason in self.explain(call, without).refused]
        raise Declined(next((reason for reason in reversed(reasons) if reason != NOT_INVARIANT), reasons[-1]))

    def _lookup(self, key: Hashable, call: Call) -> Route[Call, Result]:
        cached = self._cached_invariant if is_invariant() else self._cached
        try:
            return cached[key]
        except KeyError:
            if len(cached) >= MOST_CACHED:
                cached.clear()
            return cached.setdefault(key, self.first(call))

    def explain(self, call: Call, without: frozenset[str] = NONE) -> Explanation:
        """Return the decision without running anything, excluding the routes named in `without`."""
        refused: list[tuple[str, str]] = []
        invariant = self._has_variant and is_invariant()
        for route in self.routes:
            if invariant and not route.invariant:
                refused.append((route.name, NOT_INVARIANT))
                continue
            reason = "excluded" if route.name in without else self._not_compiled.get(route.name) or route.refuses(call)
            if reason is None:
                then = route.then(call) if route.then is not None else []
                return Explanation(route.name, tuple(refused), tuple(table.explain(inner, without) for table, inner in then))
            refused.append((route.name, reason))
        return Explanation(None, tuple(refused))

    def __iter__(self) -> Iterator[Route[Call, Result]]:
        return iter(self.routes)


def routes_of(op: Op, backend: str) -> Routes[Any, Any] | None:
    """Return the route table of an op; None if it has a single kernel."""
    name = f"auraflux.ops.{op.family}.{backend}.routes"
    try:
        tables: dict[str, Routes[Any, Any]] = importlib.import_module(name).ROUTES
    except ModuleNotFoundError as err:
        # families without routes have a single module for the backend, or none
        if err.name is None or not name.startswith(err.name):
            raise
        return None
    return tables.get(op.name)


@contextmanager
def without_routes(names: frozenset[str]) -> Iterator[None]:
    """Exclude the routes of these names from all tables inside the block."""
    token = _override.set(lambda table, call: table.first(call, names).run(call))
    try:
        with without_call_cache():
            yield
    finally:
        _override.reset(token)


def explain_call(op: Op, backend: str, arguments: dict[str, Any], without: frozenset[str] = NONE) -> Explanation | None:
    """Explain a call of an op; return None where it has no route table, or nothing to do."""
    kernel = op.kernel(backend)
    if kernel is None or routes_of(op, backend) is None:
        return None

    def explain(table: Routes[Any, Any], call: Any) -> NoReturn:
        raise _Explained(table.explain(call, without))

    token = _override.set(explain)
    try:
        with without_call_cache():
            kernel(**arguments)
    except _Explained as explained:
        return explained.verdict
    except Declined as reason:
        return Explanation(None, (("every kernel", str(reason)),))
    finally:
        _override.reset(token)
    return None
