"""Reads `conf/` with Hydra: each option of each group is composed once, cells are merged from the options.

Composing every cell would cost about 50 ms a cell (a minute for a thousand); composing every option once
and merging gives the same cells in a second. Overrides follow Hydra's grammar; `+`, `++` and `~` are
refused, because they let a misspelt key through and the study would silently run with defaults.
"""

from __future__ import annotations

import difflib
import itertools
import os
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kvstudy import HARNESS_VERSION
from kvstudy.grid import secrets
from kvstudy.grid.schema import Cell, QualityCell, Workload

#: Groups whose options make a cell, and those that make a quality cell, which is under no load.
LOAD_GROUPS = ("framework", "model", "workload", "load", "hardware")
QUALITY_GROUPS = ("framework", "model", "hardware", "quality")
GROUPS = (*LOAD_GROUPS, "quality")
#: Keys of the root that belong to no group.
ROOT_FIELDS = ("budget", "kv_memory_mib", "seed", "sweep")
#: Keys of a study, and of each of its parts: grids of which the study is the union.
STUDY_KEYS = ("name", "title", "question", "axes", "set", "parts", "leave_out")
PART_KEYS = ("axes", "set")
#: Keys of a study that a user may override on the command line.
STUDY_FIELDS = ("name", "title", "question")


#: Values of one sweep; more is a slip that would take hours to compose.
MOST_VALUES = 10_000


class ConfigError(ValueError):
    """A fault of the configuration, in one line that says what to do."""


@dataclass(frozen=True)
class Grid:
    """A product of axes, and what is fixed in it."""

    axes: dict[str, list[Any]]
    fixed: dict[str, Any]


@dataclass(frozen=True)
class StudyConfig:
    """A study as `conf/` and the overrides say it, before expansion: the union of its grids."""

    name: str
    title: str
    question: str
    grids: tuple[Grid, ...]
    leave_out: list[dict[str, Any]]
    options: dict[str, dict[str, dict[str, Any]]] = field(repr=False)  # group -> option -> composed config
    root: dict[str, Any] = field(repr=False)
    asked: frozenset[str]  # keys that the overrides named: each must apply to something


def options(conf: Path, group: str) -> list[str]:
    """Names of a group's options: the files of `conf/<group>/`."""
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))


def _choices(wrong: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(wrong, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"choices: {', '.join(known)}{hint}"


@cache
def _keys(annotation: Any, prefix: str = "") -> frozenset[str]:
    """Every dotted key under a typed field, all variants of a union together."""
    found: set[str] = set()
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _keys(typing.get_args(annotation)[0], prefix)
    if origin in (typing.Union, types.UnionType):
        for variant in typing.get_args(annotation):
            found |= _keys(variant, prefix)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, info in annotation.model_fields.items():
            if name == "pins":  # read from envs/, never set by hand
                continue
            key = f"{prefix}.{name}" if prefix else name
            found.add(key)
            found |= _keys(typing.cast(Any, info.annotation), key)
    return frozenset(found)


def _annotation(name: str) -> Any:
    return (QualityCell if name == "quality" else Cell).model_fields[name].annotation


def cell_keys() -> frozenset[str]:
    """Every key of a cell that an override may name."""
    keys: set[str] = set()
    for name in (*GROUPS, *ROOT_FIELDS):
        keys.add(name)
        keys |= _keys(_annotation(name), name)
    return frozenset(keys)


def parse_overrides(overrides: list[str], conf: Path) -> tuple[str | None, dict[str, list[Any]]]:
    """Hydra overrides -> (study option if named, values by key).

    `rate=1,2` is a sweep and gives two values. Raises ConfigError for unknown keys and options and for
    `+`, `++`, `~`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import OverrideParseException

    study: str | None = None
    values: dict[str, list[Any]] = {}
    known = cell_keys() | {f"study.{name}" for name in STUDY_FIELDS}
    for text in overrides:
        if text[:1] in "+~":
            raise ConfigError(f"'{text}': '+', '++' and '~' overrides are refused; set existing keys only")
        try:
            (override,) = OverridesParser.create().parse_overrides([text])
        except OverrideParseException as error:
            line = str(error).splitlines()[0]
            raise ConfigError(f"'{text}' is not an override (KEY=VALUE or KEY=A,B): {line}") from None
        key = override.key_or_group
        sweep = override.value() if override.is_sweep_override() else None
        if sweep is None:
            found = [_plain(override.value())]
        elif isinstance(sweep, ChoiceSweep):
            found = [_plain(value) for value in sweep.list]
        else:
            found = [_plain(value) for value in itertools.islice(override.sweep_iterator(), MOST_VALUES + 1)]
        if len(found) > MOST_VALUES:
            raise ConfigError(f"'{text[:80]}' names more than {MOST_VALUES:,} values: fewer, please")
        if key == "study":
            if len(found) != 1:
                raise ConfigError("one study at a time: study=NAME")
            study = _known_option(str(found[0]), "study", conf)
        elif key in GROUPS:
            values[key] = [_known_option(str(value), key, conf) for value in found]
        elif key in known:
            values[key] = found
        else:
            near = {k for k in known if k.count(".") == key.count(".")} | set(GROUPS) | {"study"}
            same = {k for k in near if k.split(".")[0] == key.split(".")[0]} or near
            raise ConfigError(f"unknown key '{key}'; {_choices(key, same)}")
    return study, values


def _plain(value: Any) -> Any:
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _known_option(name: str, group: str, conf: Path) -> str:
    known = options(conf, group)
    if name not in known:
        raise ConfigError(f"unknown {group} '{name}'; {_choices(name, known)}")
    return name


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _study_of(root: dict[str, Any], where: str) -> dict[str, Any]:
    """The study's own part; raises ConfigError where its file does not have a study's shape."""
    study = root.get("study")
    if not isinstance(study, dict):
        raise ConfigError(f"{where} is not a mapping of name, title, question, axes and set")
    for key in ("name", "title", "question"):
        if not isinstance(study.get(key), str):
            raise ConfigError(f"{where}: {key} is missing or not a text")
    for key in ("axes", "set"):
        if not isinstance(study.get(key) or {}, dict):
            raise ConfigError(f"{where}: {key} is not a mapping of keys to values")
    parts = study.get("parts") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"{where}: parts is not a list of mappings of axes and set")
    return study


def read_study(conf: Path, overrides: list[str]) -> StudyConfig:
    """Compose the study that `overrides` name, and every option its axes use, once each."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    study_option, values = parse_overrides(overrides, conf)

    def composed(*args: str) -> dict[str, Any]:
        try:
            container = OmegaConf.to_container(compose("config", overrides=list(args)), resolve=True)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{conf}: {' '.join(str(error).split())}") from None
        except UnicodeDecodeError:
            wrong = ", ".join(str(path) for path in sorted(conf.rglob("*.yaml")) if not _is_text(path))
            raise ConfigError(f"{wrong} is not UTF-8 text: restore or delete it") from None
        assert isinstance(container, dict)
        if any(value in str(container) for value in secrets.values()):
            raise ConfigError(
                f"{conf}: a value holds a secret of the environment (by ${{oc.env:HF_TOKEN}} or the like) and "
                "would be written beside every result: take it out; what needs it reads it from the environment"
            )
        return {str(k): v for k, v in container.items()}

    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        root = composed(*([f"study={study_option}"] if study_option else []))
        where = f"conf/study/{study_option or 'quick'}.yaml"
        study = _study_of(root, where)
        for entry, keys in ((study, STUDY_KEYS), *((part, PART_KEYS) for part in study.get("parts") or ())):
            unknown = set(entry) - set(keys)
            if unknown:
                raise ConfigError(f"{where}: unknown key '{min(unknown)}'; choices: {', '.join(keys)}")
        grids = [_grid(study, part, values) for part in study.get("parts") or [{}]]
        known = cell_keys()
        for key in (key for grid in grids for key in (*grid.axes, *grid.fixed)):
            if key not in known:
                raise ConfigError(f"{where}: unknown key '{key}'; {_choices(key, known)}")
        for key, chosen in values.items():
            if key.startswith("study."):
                study[key.removeprefix("study.")] = chosen[0]
        used: dict[str, dict[str, dict[str, Any]]] = {}
        for group in GROUPS:
            names = {_known_option(str(name), group, conf) for grid in grids for name in grid.axes.get(group, [])}
            used[group] = {name: composed(f"{group}={name}")[group] for name in sorted(names)} | {"": root[group]}
    return StudyConfig(
        name=study["name"],
        title=study["title"],
        question=study["question"],
        grids=tuple(grids),
        leave_out=[*(root.get("leave_out") or []), *(study.get("leave_out") or [])],
        options=used,
        root={name: root[name] for name in ROOT_FIELDS},
        asked=frozenset(values),
    )


def _grid(study: dict[str, Any], part: dict[str, Any], asked: dict[str, list[Any]]) -> Grid:
    """A part's grid: what it says replaces what the study says of the same key, and overrides replace both."""
    axes: dict[str, list[Any]] = {}
    fixed: dict[str, Any] = {}
    for layer in (study, part):
        for key, value in (layer.get("axes") or {}).items():
            fixed.pop(key, None)
            axes[key] = list(value) if isinstance(value, list) else [value]
        for key, value in (layer.get("set") or {}).items():
            axes.pop(key, None)
            fixed[key] = value
    for key, chosen in asked.items():
        if not key.startswith("study."):
            fixed.pop(key, None)
            axes[key] = chosen
    return Grid(axes, fixed)


def combinations(study: StudyConfig) -> Iterator[dict[str, Any]]:
    """Every combination of the axes as a plain resolved config, in the order of the grids and their axes.

    Of each grid first the cells, then the quality cells; a group without an option (`load: []`) gives none of its kind.
    A key that an option does not have (load.rate under a closed loop) does not apply to it; the combinations that
    become equal by this are given once by the caller's hash.
    """
    applied: set[str] = set()
    for grid, groups in itertools.product(study.grids, (LOAD_GROUPS, QUALITY_GROUPS)):
        leaves = {key: values for key, values in grid.axes.items() if key not in GROUPS}
        for chosen in itertools.product(*(grid.axes.get(group, [""]) for group in groups)):
            base = {g: study.options[g][str(name)] for g, name in zip(groups, chosen, strict=True)} | study.root
            mine = {key: v for key, v in leaves.items() if _applies(base, key)}
            fixed = {key: v for key, v in grid.fixed.items() if _applies(base, key)}
            applied |= set(mine) | set(fixed)
            for point in itertools.product(*mine.values()):
                config = _copy(base)
                for key, value in {**fixed, **dict(zip(mine, point, strict=True))}.items():
                    _assign(config, key, value)
                yield config
    for key in sorted(study.asked - applied):
        group = key.split(".")[0]
        if group == "study" or key in GROUPS:
            continue
        used = {str(name) for grid in study.grids for name in grid.axes.get(group, [""])}
        keys: set[str] = set()
        for name in used:
            keys |= _option_keys(group, study.options[group][name])
        names = ", ".join(sorted(used - {""})) or "chosen"
        raise ConfigError(f"'{key}' is a key of none of {group} {names}; {_choices(key, keys)}")


def _variant(annotation: Any, config: Any) -> Any:
    """The member of a discriminated union, or of one nested in it, that `config` selects by its tags."""
    variants = _members(annotation)
    if isinstance(config, dict):
        for variant in variants:
            fields = getattr(variant, "model_fields", {})
            tags = [tag for tag in ("name", "kind", "implementation") if tag in fields and tag in config]
            if tags and all(config[tag] in typing.get_args(fields[tag].annotation) for tag in tags):
                return variant
    return variants[0] if len(variants) == 1 else annotation


def _members(annotation: Any) -> list[Any]:
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation]
    return [member for inner in typing.get_args(annotation) if inner is not type(None) for member in _members(inner)]


def _option_keys(group: str, config: dict[str, Any]) -> frozenset[str]:
    return _keys(_variant(_annotation(group), config), group)


def _applies(base: dict[str, Any], key: str) -> bool:
    group, *path = key.split(".")
    if group == "quality" and len(path) > 1 and group in base and base[group].get(path[0]) is None:
        return False  # a part that the option leaves out (quality=none has none) is not made of one key
    return group in ROOT_FIELDS or (group in base and key in _option_keys(group, base[group]))


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def _assign(config: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        node = config.get(name)
        if not isinstance(node, dict):
            node = config[name] = {}
        config = node
    config[last] = value


def resolve_cores(hardware: dict[str, Any]) -> dict[str, Any]:
    """Replace `auto` cores by this machine's: the last core is the client's, the others the server's.

    With GPUs nothing is bound: visits run side by side, and on a cluster the node that will serve has other cores than
    the machine that plans.
    """
    if hardware.get("gpus"):
        return hardware | {key: [] for key in ("server_cores", "client_cores") if hardware.get(key) == "auto"}
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0, 1]
    server = available[:-1] or available
    resolved = dict(hardware)
    if resolved.get("server_cores") == "auto":
        resolved["server_cores"] = server
    if resolved.get("client_cores") == "auto":
        resolved["client_cores"] = available[-1:]
    return resolved


def to_cell(config: dict[str, Any], pins: dict[str, dict[str, str]]) -> Cell | QualityCell:
    """Type a resolved config; one with `quality` is a quality cell. `pins` holds each framework's, by name.

    Raises ConfigError in one line.
    """
    config = dict(config)
    config["hardware"] = resolve_cores(config["hardware"])
    name = config["framework"].get("name")
    if config["framework"].get("implementation") == "upstream":
        name = f"{name}-upstream"
    flavour = f"{name}-{config['hardware'].get('device')}"
    config["framework"] = config["framework"] | {"pins": pins.get(flavour, pins.get(name, {}))}
    try:
        if "quality" in config:
            return QualityCell(**config, harness_version=HARNESS_VERSION)
        config["load"] = _rate_by_tokens(config["load"], config["workload"])
        return Cell(**config, harness_version=HARNESS_VERSION)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def _rate_by_tokens(load: dict[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    """The load with the rate that offers its `token_rate` under the workload; as it is where that is not set."""
    wanted = load.get("token_rate")
    if wanted is None:
        return load
    try:
        each = Workload.model_validate(workload).tokens_a_request()
    except ValidationError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return load | {"rate": float(f"{wanted / each:.6g}")}


def explain(error: ValidationError) -> str:
    """A pydantic error as one line: where, what, and what was given."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    given = first.get("input")
    shown = "" if isinstance(given, dict) else f" (given: {given!r})"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{where or 'cell'}: {message}{shown}{more}"
