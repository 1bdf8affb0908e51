# TORCH is what pip installs first. On Linux the default index serves a CUDA build of several gigabytes; to get the
# CPU build, point pip at an index of CPU wheels (PIP_INDEX_URL or PIP_EXTRA_INDEX_URL), or have one on disk.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-full lint bench clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/stepbind demo

test: lint
	$(BIN)/pytest --numprocesses=2

test-full: $(VENV)/ready
	$(BIN)/pytest --numprocesses=2 --full

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python bench/cpu.py

clean:
	rm -rf $(VENV) build
