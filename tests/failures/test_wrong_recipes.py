"""A recipe that cannot be right, and a run folder that cannot be written: one message, exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.config import load_recipe
from samestep.errors import ConfigError
from samestep.track.folder import RunFolder, refuse_used

RIGHT = """
task: lm
model: {layers: 1, width: 16, heads: 2, context: 16}
data: {text: text.txt}
batching: {global_batch: 12, micro_batch: 2}
optimizer: {name: adamw, lr: 4e-3}
steps: 3
"""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["expected keys with values", "task: lm"]),
        (b"- a\n", ["expected keys with values", "['a']"]),
        (b"task: lm\n\tmodel: 3\n", ["line 2, column 1", "not YAML"]),
        (b"{{{", ["not YAML"]),
        (b"\xff\xfe\x00\x96", ["cannot be read as text"]),
        (RIGHT.encode() + b"stepz: 3\n", ["unknown key stepz. Did you mean steps?"]),
        (RIGHT.encode() + b"steps: 4\n", ["the key steps stands twice, on lines 7 and 8"]),
        (RIGHT.encode() + b"epochs: 1\n", ["either steps or epochs, and not both: steps 3 and epochs 1"]),
        (RIGHT.replace("steps: 3", "").encode(), ["either steps or epochs", "neither is set"]),
        (RIGHT.replace("steps: 3", "steps: -3").encode(), ["steps is -3"]),
        (RIGHT.replace("12,", "many,").encode(), ["batching.global_batch is 'many'", "integer"]),
        (RIGHT.replace("adamw", "adamm").encode(), ["optimizer.name is 'adamm'. Did you mean adam"]),
    ],
)
def test_what_a_recipe_may_hold(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [])
    assert "wrong.yaml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("stepz=3", ["unknown key stepz. Did you mean steps?"]),
        ("optimizer.lrr=3", ["unknown key optimizer.lrr. Did you mean lr?"]),
        ("steps=many", ["steps is 'many'", "integer"]),
        ("steps", ["expected key.path=value"]),
        ("precision=fp61", ["precision is 'fp61'. Did you mean fp16?"]),
        ("strategy=zero", ["strategy is 'zero'. Did you mean zero1?"]),
        ("reduction=orderd", ["reduction is 'orderd'. Did you mean ordered?"]),
    ],
)
def test_what_set_may_change(tmp_path: Path, assignment: str, words: list[str]) -> None:
    path = tmp_path / "right.yaml"
    path.write_text(RIGHT)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [assignment])
    assert f"--set {assignment}" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_recipe_that_is_no_file(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nowhere.yaml", "there is no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            load_recipe(path, [])


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is a file\. Name one where you may write"):
        refuse_used(tmp_path / "file" / "deep" / "run")
    with pytest.raises(ConfigError, match=r"cannot be written: .*Name one where you may write"):
        RunFolder(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_in_a_folder_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable for you"):
        refuse_used(tmp_path / "runs" / "one")


def test_the_command_line_says_it_once_and_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "right.yaml").write_text(RIGHT)
    (tmp_path / "text.txt").write_text("words " * 200)
    command = [sys.executable, "-m", "samestep", "train", "right.yaml", "--folder", "text.txt/run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "text.txt is a file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
