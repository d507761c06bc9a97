"""YAML as its writers mean it: `3e-4` is a number, `no` is a word, a key stands once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, final

import yaml

from samestep.errors import ConfigError


@final
class _PlainLoader(yaml.SafeLoader):
    """The safe loader with the scalars of YAML 1.2, since 1.1 reads `3e-4` as text and `1:30` as 90."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that stands twice: the first value would be lost without a word."""
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in lines:
                raise ConfigError(
                    f"the key {key} stands twice, on lines {lines[key]} and {line}. Remove one."
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def _resolve(tag: str, pattern: str, first: Sequence[str]) -> None:
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""])
_resolve("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$", "-+0123456789")
_resolve(
    "float",
    r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    "-+0123456789.",
)
_resolve("merge", r"^<<$", "<")


def parse_yaml(text: str, source: str) -> object:
    """Return the value that `text` holds; otherwise raise ConfigError with `source` and line."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: this is not YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: this is not YAML: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping that a file holds; raise ConfigError where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}.") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: expected keys with values (such as `task: lm`), found {value!r:.60}.")
    return value


def write_yaml(values: dict[str, Any]) -> str:
    """Return `values` as YAML in the order given, floats such that they are read back exactly."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
