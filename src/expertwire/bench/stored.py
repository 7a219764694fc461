"""Reports read back from JSON, and the JSON Schema of such files: both follow the dataclasses of ``schema``.

A file of an older version may lack what has a default: it was measured as the default says.

``python -m expertwire.bench.stored`` prints the schema; ``schema.json`` beside this file is its output.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from expertwire.bench.schema import SCHEMA, Report, to_plain
from expertwire.errors import InvalidArgumentError

SCHEMA_FILE = Path(__file__).with_name("schema.json")
_UNIONS = (types.UnionType, typing.Union)
_WORDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("boolean", lambda value: isinstance(value, bool)),
    int: ("integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("number", lambda value: type(value) in (int, float) and math.isfinite(value)),
    str: ("string", lambda value: isinstance(value, str)),
}


class _UnfitError(Exception):
    """A value is not what its place asks for; ``args`` are the place and what is wrong."""


def read_report(path: Path) -> Report:
    """Return the report that ``expertwire bench --json`` wrote.

    Raises:
        InvalidArgumentError: there is no such file, or it holds something else; the text names the place in the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot read it ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else None
        raise InvalidArgumentError(
            f"{path}: schema is {found!r}, must be {SCHEMA!r}: written by expertwire bench --json"
        )
    values.pop("schema")
    try:
        report = _parse(values, Report, "")
        _check_samples(report)
    except _UnfitError as unfit:
        place, wrong = unfit.args
        raise InvalidArgumentError(f"{path}: {place or 'the file'}: {wrong}") from None
    assert isinstance(report, Report)  # noqa: S101 (for the type checker)
    return report


def _check_samples(report: Report) -> None:
    for number, run in enumerate(report.runs):
        for index, result in enumerate(run.results):
            for phase in result.phases:
                if phase not in (result.samples or {}):
                    raise _UnfitError(f"runs[{number}].results[{index}].phases.{phase}", "there are no samples of it")


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _parse(value: Any, kind: Any, place: str) -> Any:
    """Return ``value``, as JSON gave it, as an object of type ``kind``."""
    if kind is Any:
        return value
    if kind in _WORDS:
        word, fits = _WORDS[kind]
        if not fits(value):
            raise _UnfitError(place, f"{_shown(value)} is no {word}")
        return value
    if typing.get_origin(kind) is not None:
        return _parse_composed(value, kind, place)
    if issubclass(kind, Enum):
        allowed = [member.value for member in kind]
        if value not in allowed:
            raise _UnfitError(place, f"{_shown(value)} is not among {', '.join(map(str, allowed))}")
        return kind(value)
    return _parse_object(value, kind, place)


def _parse_composed(value: Any, kind: Any, place: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        number, least = _parse(value, inner[0], place), inner[1].value
        if number < least:
            raise _UnfitError(place, f"{_shown(value)} is below {least}")
        return number
    if origin in _UNIONS:
        return None if value is None else _parse(value, _other_than_none(inner), place)
    if origin is np.ndarray:
        return _parse_samples(value, place)
    if origin is tuple:
        _must_be(list, value, place)
        return tuple(_parse(item, inner[0], f"{place}[{index}]") for index, item in enumerate(value))
    _must_be(dict, value, place)
    return {key: _parse(item, inner[1], f"{place}.{key}") for key, item in value.items()}


def _other_than_none(kinds: tuple[Any, ...]) -> Any:
    (other,) = (one for one in kinds if one is not type(None))
    return other


def _parse_object(value: Any, kind: Any, place: str) -> Any:
    _must_be(dict, value, place)
    hints, defaults = _fields(kind), _defaults(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise _UnfitError(place, f"{unknown[0]!r} is not known here")
    if missing := [name for name in hints if name not in value and name not in defaults]:
        raise _UnfitError(place, f"{missing[0]!r} is missing")
    return kind(**{name: _parse(value[name], hints[name], f"{place}.{name}".lstrip(".")) for name in value})


def _parse_samples(value: Any, place: str) -> Any:
    _must_be(list, value, place)
    try:
        samples = np.array(value)
    except ValueError:  # rows of different lengths
        samples = np.zeros(0)
    if samples.ndim != 2 or samples.size == 0 or samples.dtype.kind != "i" or samples.min() < 0:
        raise _UnfitError(place, "must be whole numbers of at least 0, [rank][iteration]")
    return samples


def _must_be(kind: type, value: Any, place: str) -> None:
    if not isinstance(value, kind):
        raise _UnfitError(place, f"{_shown(value)} is no {'array' if kind is list else 'object'}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the fields that may be missing, and what they are then."""
    nothing = dataclasses.MISSING
    plain = {field.name: field.default for field in dataclasses.fields(kind) if field.default is not nothing}
    made = {one.name: one.default_factory() for one in dataclasses.fields(kind) if one.default_factory is not nothing}
    return {**plain, **made}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema, draft 2020-12, of what ``expertwire bench --json`` writes."""
    definitions: dict[str, Any] = {}
    _describe(Report, definitions)
    report = definitions.pop("Report")
    report["properties"] = {"schema": {"const": SCHEMA}, **report["properties"]}
    report["required"].insert(0, "schema")
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Result of expertwire bench"}
    return {**heading, **report, "$defs": dict(sorted(definitions.items()))}


def _describe(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; objects and enumerations go to ``definitions`` and are referred to."""
    if kind is Any:
        return {}
    if kind in _WORDS:
        return {"type": _WORDS[kind][0]}
    if typing.get_origin(kind) is not None:
        return _describe_composed(kind, definitions)
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = _describe_named(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _describe_composed(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return {**_describe(inner[0], definitions), "minimum": inner[1].value}
    if origin in _UNIONS:
        return {"anyOf": [_describe(_other_than_none(inner), definitions), {"type": "null"}]}
    if origin is np.ndarray:
        row = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
        return {"type": "array", "minItems": 1, "items": row}
    if origin is tuple:
        return {"type": "array", "items": _describe(inner[0], definitions)}
    return {"type": "object", "additionalProperties": _describe(inner[1], definitions)}


def _describe_named(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    said, defaults = _attributes(kind), _defaults(kind)
    properties = {}
    for name, hint in _fields(kind).items():
        properties[name] = {
            **_describe(hint, definitions),
            **({"description": said[name]} if name in said else {}),
            **({"default": to_plain(defaults[name])} if name in defaults else {}),
        }
    return {
        "description": (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("``", ""),
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in defaults],
        "additionalProperties": False,
    }


def _attributes(kind: Any) -> dict[str, str]:
    """Return what the docstring of a dataclass says under ``Attributes:``, by name."""
    said: dict[str, str] = {}
    _, _, text = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", text, re.MULTILINE):
        for name in names.split(", "):
            said[name] = " ".join(meaning.replace("``", "").split())
    return said


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
