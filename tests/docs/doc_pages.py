"""Running a Markdown page: its Python blocks, its files and its commands, with the output it shows.

A block whose first line is a comment with a file name is that file. Other Python blocks run one after the
other in one namespace, and a `text` block right after one is what it prints. In a `console` block each line
after `$ ` is a command, and what follows is its output. `...` stands for anything, alone on a line for any
lines. Fingerprints differ between machines; so each stands for any other, but always for the same one.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# ([\w/]+\.(?:py|yaml))\n")
HEX = re.compile(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{16}\b")
COMMAND_S = 180
# They set up a machine, and `make test` is what runs this.
SET_UP = ("make ", "git clone ", "pip install ")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    follows: bool  # nothing but blank lines stands between it and the block before


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found, end = [], 0
    for match in FENCE.finditer(text):
        between = text[end : match.start()].strip()
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2], line, follows=bool(found) and not between))
        end = match.end()
    return found


class Page:
    """A page on its way from the first block to the last, in a folder of its own."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.seen: dict[str, str] = {}  # fingerprint on the page -> fingerprint here
        self.ran: list[str] = []
        self._printed = ""

    def run(self) -> None:
        for block in blocks_of(self.path):
            place = f"{self.path.name}, line {block.line}"
            name = FILE.match(block.text)
            if name and block.language in ("python", "yaml"):
                (self.folder / name[1]).write_text(block.text)
            elif block.language == "python":
                self._printed = self._execute(block, place)
            elif block.language == "console":
                self._command(block, place)
            elif block.language == "text" and block.follows:
                self._compare(block.text, self._printed, place)

    def _execute(self, block: Block, place: str) -> str:
        code = compile("\n" * block.line + block.text, str(self.path), "exec")
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            exec(code, self.namespace)
        return printed.getvalue()

    def _command(self, block: Block, place: str) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            if command.startswith(SET_UP):
                continue
            here = Path(sys.executable).parent
            environ = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "TERM": "dumb", "COLUMNS": "200"}
            done = subprocess.run(
                command,
                shell=True,
                cwd=self.folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            # A code other than 0 stands on the page where it is meant: `...; echo $?`.
            assert done.returncode == 0, f"{place}: {command}\n{done.stdout}"
            self.ran.append(command)
            self._compare(shown, done.stdout, place)

    def _compare(self, shown: str, printed: str, place: str) -> None:
        if not shown.strip():
            return
        match = re.fullmatch(self._pattern(shown), _plain(printed))
        assert match, f"{place}: the page shows\n{shown}\nbut this was printed\n{printed}"
        for name, found in match.groupdict().items():
            known = self.seen.setdefault(name[1:17], found[:16])
            assert known == found[:16], f"{place}: {name} was {known} before, and is {found} here"
        assert len(set(self.seen.values())) == len(self.seen), f"{place}: these should differ: {self.seen}"

    def _pattern(self, shown: str) -> str:
        lines = [
            r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
            for line in _plain(shown).splitlines()
        ]
        found = itertools.count()
        # The first 16 digits name it, so that a table that shows no more means the same fingerprint.
        return HEX.sub(
            lambda value: f"(?P<h{value[0][:16]}_{next(found)}>[0-9a-f]{{{len(value[0])}}})", "".join(lines)
        )


def _plain(text: str) -> str:
    lines = [re.sub(r" +", " ", line).rstrip() for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line)
