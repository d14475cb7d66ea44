"""Old names of keyword arguments: they work for one release and raise a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def renamed_arguments(new_names: dict[str, str]) -> Callable[[Function], Function]:
    """Let a function accept old names of its keyword arguments: `@renamed_arguments({"old": "new"})`."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for old in new_names.keys() & given.keys():
                new = new_names[old]
                if new in given:
                    raise TypeError(f"{old} is now {new}: give {new} alone.")
                warnings.warn(f"{old} is now {new}.", DeprecationWarning, stacklevel=2)
                given[new] = given.pop(old)
            return function(*args, **given)

        return call  # type: ignore[return-value]

    return decorate


def renamed_fields(new_names: dict[str, str]) -> Callable[[Class], Class]:
    """Let a dataclass accept old names of its fields: `@renamed_fields({"old": "new"})` above `@dataclass`."""

    def decorate(cls: Class) -> Class:
        cls.__init__ = renamed_arguments(new_names)(cls.__init__)  # type: ignore[misc]
        return cls

    return decorate
