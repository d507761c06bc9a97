"""Print the catalogue's table as measured on this machine, and where it differs from the committed one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from samestep.numerics import catalogue
from samestep.numerics.experiments.operations import OPERATIONS
from samestep.numerics.experiments.sweep import sweep
from samestep.numerics.experiments.table import Table, broken, child, differences, run_all, text

DATA = Path(catalogue.__file__).with_name("catalogue.json")
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"


def main() -> int:
    """Return 1 if an operation moved in exact mode, else 0."""
    options = _options()
    device = torch.device(options.device)
    if options.child:
        chosen = [operation for operation in OPERATIONS if options.only in operation.name]
        json.dump(child(chosen, device, cells=options.child == "cells"), sys.stdout)
        return 0
    if options.sweep:
        print(sweep(device))
        return 0
    if options.page and not options.write:
        _write_page(options.page, options.device)
        return 0
    measured = run_all(device, options.only)
    for name, row in measured["operations"].items():
        moved = {column: cell for column, cell in row.items() if cell and column != "inputs"}
        print(f"{name}: {moved or 'same in all columns'}")
    print(f"\nDifferences from the committed table of {options.device}:")
    print("\n".join(differences(measured, options.device)) or "none")
    if options.write:
        _write_table(options.device, measured)
    if options.page:
        _write_page(options.page, options.device)
    for name in (moving := broken(measured)):
        print(f"{name} moves in exact mode, which breaks its promise: please report it.")
    return 1 if moving else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m samestep.numerics.experiments", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="operations whose name holds this text")
    parser.add_argument("--write", action="store_true", help="replace the committed table")
    parser.add_argument("--page", type=Path, help="write the committed table into this Markdown page")
    parser.add_argument(
        "--sweep", action="store_true", help="run torch's own list of operations in exact mode"
    )
    parser.add_argument("--child", choices=("cells", "hashes"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write replaces the whole table, so it does not go with --only")
    return options


def _write_table(device: str, measured: Table) -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    data[device] = measured
    DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_page(page: Path, device: str) -> None:
    before, rest = page.read_text(encoding="utf-8").split(START)
    _, after = rest.split(END)
    page.write_text(before + START + text(device) + END + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
