"""The tables of docs/reference.md that are made from the code; run this file to write them again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from samestep import Batching, Precision
from samestep.cli.app import app
from samestep.config import AdamSettings, Recipe, ScheduleSettings, SgdSettings
from samestep.config.checkpointing import Checkpointing
from samestep.config.recipe import AverageSettings
from samestep.tasks.lm import GptSettings, TextSettings
from samestep.topology.launchers import LAUNCHERS, REFUSED
from samestep.track.ledger import FIELDS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
LIMITS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


def made() -> dict[str, str]:
    """Return each generated part of the page by its name."""
    settings: dict[str, type[BaseModel]] = {
        "recipe": Recipe,
        "batching": Batching,
        "optimizer adamw": AdamSettings,
        "optimizer sgd": SgdSettings,
        "schedule": ScheduleSettings,
        "checkpoint": Checkpointing,
        "ema": AverageSettings,
        "lm model": GptSettings,
        "lm data": TextSettings,
        "precision": Precision,
    }
    parts = {name: settings_table(kind) for name, kind in settings.items()}
    parts["launchers"] = launcher_table()
    parts["refused launchers"] = refused_table()
    parts["commands"] = "\n\n".join(command_sections())
    parts["ledger fields"] = ", ".join(f"`{name}`" for name in FIELDS) + "."
    return parts


def written(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with each generated part put between its two marks."""
    for name, text in parts.items():
        mark, end = f"<!-- made: {name} -->\n", "\n<!-- end -->"
        pattern = re.compile(re.escape(mark) + ".*?" + re.escape(end), re.DOTALL)
        page, count = pattern.subn(lambda _, new=mark + text + end: new, page)
        assert count == 1, f"the page has the part {name} {count} times, not once"
    return page


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def settings_table(settings: type[BaseModel]) -> str:
    """Return one row for each key, from the description that stands beside its type."""
    schema = settings.model_json_schema()
    needed = schema.get("required", [])
    rows = [
        (f"`{name}`", kind(part), "needed" if name in needed else default(part), part.get("description", ""))
        for name, part in schema["properties"].items()
    ]
    return table(("key", "value", "default", "meaning"), rows)


def kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return kind(next(part for part in schema["anyOf"] if part.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("format") == "path":
        return "path"
    if schema.get("type") == "array":
        length = schema.get("maxItems")
        return f"list of {length} numbers" if length else f"list of {kind(schema['items'])}"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        return "names and values"
    if schema.get("type") not in TYPES:
        return "keys of its own, below"
    # 2**63 is the one limit that no reader wants to see in figures.
    limits = [f"{word} {schema[key]:g}" for key, word in LIMITS.items() if schema.get(key, 2**63) < 2**63]
    return " ".join([TYPES[schema["type"]], *limits])


def default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    if isinstance(value, list | dict) and not value:
        return "none"
    if isinstance(value, dict):
        return f"`name: {value['name']}`" if "name" in value else "empty"
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else repr(value).strip(chr(39))}`"


def command_sections() -> Iterator[str]:
    """Return a section for each command of `samestep`: what it does, its arguments and options."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        shown = [parameter for parameter in command.params if parameter.name != "help"]
        arguments = [argument(p) for p in shown if p.param_type_name == "argument"]
        usage = " ".join(["samestep", name, "[options]", *arguments])
        rows = [option_row(parameter) for parameter in shown]
        yield f"### `{usage}`\n\n{command.help}\n\n" + table(("argument", "default", "meaning"), rows)


def argument(parameter: Any) -> str:
    # Versions of typer differ in how they wrap the name.
    name = (parameter.metavar or parameter.name).strip("{}[].")
    return name if parameter.required else f"[{name} ...]"


def option_row(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        return f"`{argument(parameter)}`", "needed" if parameter.required else "none", parameter.help
    value = "" if parameter.is_flag else f" {(parameter.metavar or parameter.name).upper()}"
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    return f"`{parameter.opts[0]}{value}`", "none" if shown in (None, False) else str(shown), parameter.help


def code(*names: str | None) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def launcher_table() -> str:
    """Return one row for each launcher whose ranks are joined, in the order in which they are asked."""
    rows = []
    for row in LAUNCHERS:
        local = (row.local_rank, row.local_world_size, *(row.local_counts or ())[:1])
        where = row.rendezvous or tuple(host.variable for host in row.hosts)
        rows.append(
            (row.name, code(*row.proofs[:1], row.rank, row.world_size), code(*local), code(*where), row.note)
        )
    return table(
        ("launcher", "proof, rank, world size", "local rank, local world size", "meeting point", "note"), rows
    )


def refused_table() -> str:
    """Return one row for each launcher that is refused, with what starts ranks there."""
    rows = [(row.name, code(*row.proofs), row.start.replace("SCRIPT  (", "SCRIPT (")) for row in REFUSED]
    return table(("launcher", "told by", "what starts the ranks"), rows)


if __name__ == "__main__":
    REFERENCE.write_text(written(REFERENCE.read_text(), made()))
