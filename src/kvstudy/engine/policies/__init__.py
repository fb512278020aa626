"""KV policies by name. One module a policy; importing it registers it.

To add one: write `policies/<name>.py` with a class derived from `base.Policy`, decorate it with `@register`,
and name the module in `MODULES`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from pydantic import ValidationError

from kvstudy.engine.policies.base import Context, Options, Policy

MODULES: dict[str, str] = {
    "full": "kvstudy.engine.policies.full",
    "offload": "kvstudy.engine.policies.offload",
    "streaming": "kvstudy.engine.policies.streaming",
    "h2o": "kvstudy.engine.policies.h2o",
    "infinigen": "kvstudy.engine.policies.infinigen",
    "random": "kvstudy.engine.policies.random",
}
"""Where each policy is defined; imported when first asked for."""

_registry: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


class UnknownPolicy(ValueError):
    """No policy of that name; the message names those there are."""


class WrongOptions(ValueError):
    """An option that the policy does not have, or a value that it does not take."""


def register(cls: P) -> P:
    """Class decorator: make a policy known by its `name`."""
    _registry[cls.name] = cls
    return cls


def names() -> list[str]:
    """All policies there are."""
    return sorted({name for name, module in MODULES.items() if find_spec(module)} | set(_registry))


def policy_class(name: str) -> type[Policy]:
    """The class of that name; raises `UnknownPolicy`."""
    if name not in _registry and name in MODULES and find_spec(MODULES[name]):
        import_module(MODULES[name])
    if name not in _registry:
        raise UnknownPolicy(f"unknown policy {name!r}; there are: {', '.join(names())}")
    return _registry[name]


def check(name: str, options: dict[str, Any]) -> Options:
    """The options, checked; raises `UnknownPolicy`, or `WrongOptions` that names the wrong one."""
    cls = policy_class(name)
    try:
        return cls.Options.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = ", ".join(cls.Options.model_fields) or "none"
        raise WrongOptions(f"policy {name!r}, option {where}: {first['msg']} (its options: {known})") from None


def create(name: str, context: Context, options: dict[str, Any]) -> Policy:
    """An instance; raises as `check` does."""
    return policy_class(name)(context, check(name, options))
