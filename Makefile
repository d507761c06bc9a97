# Two commands do everything: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "samestep needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# What only tests and checks need, the optional trackers among it.
.venv/equipped: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check,tensorboard,mlflow,wandb]'
	touch $@

demo: .venv/installed
	$(BIN)/samestep train examples/austen.yaml

check: .venv/equipped
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n 2 --dist worksteal

clean:
	rm -rf .venv runs
