"""Run the experiments in three fresh processes, and make the table of what they found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import torch

from samestep.errors import ClusterError
from samestep.numerics.catalogue import COLUMNS, Origin, catalogue, origin
from samestep.numerics.exact import CUBLAS_WORKSPACES
from samestep.numerics.experiments.measure import Experiment, fresh, measure, moved_between
from samestep.numerics.experiments.operation import Operation

Table: TypeAlias = dict[str, Any]  # what stands in catalogue.json under the type of a device

TIMEOUT_S = 900
AVX2_ONLY = ("ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2", "MKL_ENABLE_INSTRUCTIONS=AVX2")


def child(operations: Sequence[Operation], device: torch.device, *, cells: bool) -> Table:
    """Do one process's part: the hashes under each condition, and the cells where asked for."""
    return {
        operation.name: {
            "inputs": Experiment(operation, device).inputs,
            "cells": measure(operation, device) if cells else {},
            "hashes": fresh(operation, device),
        }
        for operation in operations
    }


def run_all(device: torch.device, only: str) -> Table:
    """Measure every operation whose name holds `only`. Takes one to two minutes on two cores."""
    here = _run_child(device, only, cells=True)
    again = _run_child(device, only)
    avx2 = _run_child(device, only, variables=AVX2_ONLY) if _capability(device) == "AVX512" else None
    return {
        "origin": _origin(device),
        "operations": {name: _row(name, here, again, avx2) for name in here},
    }


def differences(measured: Table, device: str) -> list[str]:
    """Say where the measured table differs from the committed one, one sentence each."""
    committed = {entry.operation: entry for entry in catalogue(device)}
    found = []
    for name, row in measured["operations"].items():
        if name not in committed:
            found.append(f"{name}: not in the committed table")
            continue
        for column in COLUMNS:
            new, old = _cell(row[column]), _cell(list(committed[name].moved.get(column, ())))
            verdict = getattr(committed[name], column)
            old = old if verdict in ("same", "moves") else _word(verdict)
            if new != old:
                found.append(f"{name}, {column}: was {old}, is {new}")
    return found


def broken(measured: Table) -> list[str]:
    """Name the operations that moved in exact mode, which breaks its promise."""
    return [
        name
        for name, row in measured["operations"].items()
        if isinstance(row["exact"], list) and row["exact"]
    ]


def text(device: str = "cpu") -> str:
    """Write the committed table as Markdown, with what it adds up to."""
    entries, where = catalogue(device), origin(device)
    if where is None:
        return f"Not measured on {device}.\n"
    lines = [
        " ".join(
            (
                f"{len(entries)} operations, measured with torch {where.torch}",
                f"on {where.processor}, {where.capability}, {where.date}.",
            )
        ),
        "",
        "| column | compares | same | moves | refused | no such question |",
        "|---|---|---|---|---|---|",
    ]
    for column, meaning in COLUMNS.items():
        verdicts = [getattr(entry, column) for entry in entries]
        counts = " | ".join(str(verdicts.count(word)) for word in ("same", "moves", "refused", "unmeasured"))
        lines.append(f"| {column} | {meaning} | {counts} |")
    lines += [
        "",
        "A cell names the results that moved; · means the same bits; an empty cell, no such question.",
        "",
        "| operation | inputs | " + " | ".join(column.replace("_", " ") for column in COLUMNS) + " |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for entry in entries:
        cells = [
            ", ".join(entry.moved[column]) if column in entry.moved else _word(getattr(entry, column))
            for column in COLUMNS
        ]
        name = f"{entry.operation} ({entry.note})" if entry.note else entry.operation
        lines.append(f"| {name} | {entry.inputs} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _row(name: str, here: Table, again: Table, avx2: Table | None) -> Table:
    row, hashes = here[name]["cells"], here[name]["hashes"]
    row["processes"] = moved_between(hashes, again[name]["hashes"], "threads")
    if isinstance(row["exact"], list):
        row["exact"] += moved_between(hashes, again[name]["hashes"], "exact")
        if avx2 is not None:
            row["instructions"] = moved_between(hashes, avx2[name]["hashes"], "1 threads, exact")
    return {"inputs": here[name]["inputs"], **{column: row.get(column) for column in COLUMNS}}


def _run_child(
    device: torch.device, only: str, *, cells: bool = False, variables: Sequence[str] = ()
) -> Table:
    command = [
        *("env", f"CUBLAS_WORKSPACE_CONFIG={CUBLAS_WORKSPACES[0]}", *variables),
        *(sys.executable, "-m", "samestep.numerics.experiments"),
        *("--child", "cells" if cells else "hashes", "--device", str(device), "--only", only),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise ClusterError(
            f"A process of the experiments ended with exit code {done.returncode}. It said:\n{done.stderr}"
        )
    found: Table = json.loads(done.stdout)
    return found


def _origin(device: torch.device) -> Mapping[str, str]:
    where = Origin(
        torch=str(torch.__version__),
        capability=_capability(device),
        processor=_processor(device),
        date=datetime.now(UTC).date().isoformat(),
    )
    return {name: getattr(where, name) for name in Origin.__slots__}


def _capability(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return str(torch.backends.cpu.get_cpu_capability())


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return str(torch.cpu.get_capabilities().get("cpu_name", "an unknown processor"))


def _cell(cell: list[str] | str | None) -> str:
    if isinstance(cell, list):
        return "same" if not cell else "moves: " + ", ".join(cell)
    return _word("unmeasured" if cell is None else cell)


def _word(verdict: str) -> str:
    return {"same": "·", "unmeasured": ""}.get(verdict, verdict)
