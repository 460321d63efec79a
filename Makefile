# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo federation test test-engines matrix claims browser bench bench-federation bench-parts bench-costs clean

demo: .venv/installed
	$(BIN)/fedsieve demo --out demo

# Five nodes on this machine, with certificates and keys, beside their simulation: about a minute on 2 cores.
federation: .venv/installed-flower
	$(BIN)/python scripts/federation.py

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal \
		-m "not engines"

# Clients on a Ray cluster, and at nodes of a federation, all on this machine: about 5 minutes on 2 cores.
test-engines: .venv/installed-engines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine tests/federation -m engines \
		--numprocesses 2 --dist loadfile

# Every allowed combination of methods, aggregators, optimizers, masks and secure sums: about 45 minutes on 2 cores.
matrix: .venv/installed-dev
	FEDSIEVE_MATRIX=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/experiment/test_combinations.py \
		--numprocesses auto --maxprocesses 4 --dist worksteal

# The tests of HTML pages need a browser; without one they are skipped.
browser: .venv/browser

# docs/claims.md and its pictures, from the raw results in docs/results.
claims: .venv/installed
	$(BIN)/python scripts/claims.py

bench: bench/.venv/installed
	bench/$(BIN)/python bench/peers.py

# What messages, clients and actors cost, for docs/scale.md: about 15 minutes on 2 cores.
bench-costs: bench/.venv/installed
	bench/$(BIN)/python bench/costs.py

# Rounds and memory of a federation over Flower, beside Flower's own nodes, for docs/federation.md: about 25 minutes.
bench-federation: .venv/installed-flower
	$(BIN)/python bench/federation.py

bench-parts: .venv/installed
	$(BIN)/python bench/transform.py
	$(BIN)/python bench/wire.py
	$(BIN)/python bench/drift.py
	$(BIN)/python bench/sieve.py
	$(BIN)/python bench/optimizers.py
	$(BIN)/python bench/precision.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ .venv/installed

.venv/installed-flower: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[flower]'
	touch $@ .venv/installed

.venv/installed-engines: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[dev,ray]'
	touch $@

.venv/browser: .venv/installed-dev scripts/get_browser.sh
	bash scripts/get_browser.sh $(BIN)
	touch $@

# The peers that the benchmark compares with have an environment of their own, with fedsieve in it.
bench/.venv/bin/python:
	$(PYTHON) -m venv bench/.venv

bench/.venv/installed: bench/.venv/bin/python pyproject.toml bench/requirements.txt
	bench/$(BIN)/python -m pip install --quiet --editable . --requirement bench/requirements.txt
	touch $@

clean:
	rm -rf .venv bench/.venv demo runs build
