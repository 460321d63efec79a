# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test bench clean

demo: .venv/installed
	$(BIN)/fedsieve demo --out demo

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: .venv/installed
	$(BIN)/python bench/wire.py
	$(BIN)/python bench/drift.py
	$(BIN)/python bench/sieve.py
	$(BIN)/python bench/precision.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv demo runs build
