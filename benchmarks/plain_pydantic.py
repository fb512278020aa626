"""The few names of pydantic that the engine uses, without its checks: for `gpu_check` on machines that lack pydantic.

Keyword arguments become attributes, defaults are filled in, an unknown key is an error; values are taken as they come.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

_MISSING = object()


class ValidationError(ValueError):
    """Never raised here; `policies.check` catches it."""


class _Default:
    def __init__(self, value: Any, factory: Callable[[], Any] | None) -> None:
        self.value, self.factory = value, factory

    def make(self) -> Any:
        return self.factory() if self.factory is not None else copy.copy(self.value)


def Field(default: Any = _MISSING, *, default_factory: Callable[[], Any] | None = None, **_: Any) -> Any:
    """A field's default; its bounds are not checked."""
    return _Default(default, default_factory)


def ConfigDict(**options: Any) -> dict[str, Any]:
    """Options that are not looked at."""
    return options


def model_validator(**_: Any) -> Callable[[Any], Any]:
    """A decorator that leaves a method as it is: it is not called."""
    return lambda method: method


class BaseModel:
    """Keyword arguments as attributes."""

    model_config: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        names = [n for cls in reversed(type(self).__mro__) for n in vars(cls).get("__annotations__", {})]
        fields = [name for name in names if name != "model_config"]
        if unknown := set(given) - set(fields):
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        for name in fields:
            default = getattr(type(self), name, _MISSING)
            value = given.get(name, default)
            value = value.make() if isinstance(value, _Default) else value
            if value is _MISSING:
                raise TypeError(f"{type(self).__name__} needs {name}")
            setattr(self, name, value)

    @classmethod
    def model_validate(cls, given: Any) -> Any:
        """An instance from a dict; anything else is returned as it is."""
        return cls(**given) if isinstance(given, dict) else given

    def model_copy(self, *, update: dict[str, Any]) -> Any:
        """The same with some attributes changed."""
        other = copy.copy(self)
        vars(other).update(update)
        return other
