"""Settings as people write them: YAML, and `key.sub=value` laid over it. Light: neither torch nor pydantic is needed to
answer a mistake in one."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from leftward.errors import UserError

# What the library raises for text that is no YAML, or that names a type and is not of it.
YAML_FAULTS = (yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; here it is a number, as in YAML 1.2."""


def _mapping_without_doubles(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """A key that stands twice would be taken once, in silence."""
    keys = [key.value for key, _ in node.value]
    if double := next((key for key in keys if isinstance(key, str) and keys.count(key) > 1), None):
        raise yaml.constructor.ConstructorError(None, None, f"{double} stands twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_doubles)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Raises: one of YAML_FAULTS."""
    return yaml.load(text, _Loader)


def override(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with `key.sub=value` settings laid over it; the value is read as YAML. Raises: UserError."""
    result = copy.deepcopy(dict(values))
    for text in overrides:
        key, equals, value = text.partition("=")
        *sections, name = key.split(".")
        if not equals or not all((*sections, name)):
            raise UserError(f"override {text!r}: write it as key=value or section.key=value")
        try:
            parsed = parse_yaml(value)
        except YAML_FAULTS:
            raise UserError(f"override {text!r}: {value!r} is not YAML; quote it") from None
        place = result
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise UserError(f"override {text!r}: {section} has no fields")
        place[name] = parsed
    return result
