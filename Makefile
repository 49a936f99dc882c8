# make demo   a first look: a paired comparison on embedded data, then a table and a report
# make test   lint, types, import rules, tests (what CI runs)
# make docs   the documentation as a static site in build/site
# All create .venv and install what they need; nothing but Python 3.11+ and make is required.

PYTHON ?= python3
BIN := .venv/bin
# Many small steps: one thread per process is fastest, and does not collapse on a busy machine.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, and none of them should have to compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-all docs fuzz lint format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -4

demo: .venv/.installed
	$(BIN)/niss compare --preset demo --out runs/demo --overwrite

# Beside each other: the tests often wait for processes and leave room for the rest.
test: .venv/.installed-dev
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

# In three processes, each with a stretch of the files, so that few fixtures of a file are made twice.
pytest: .venv/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist worksteal --hypothesis-profile=ci

test-all: lint
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

# The reference pages are written anew, then the site; a broken link or anchor fails it.
docs: .venv/.installed-dev
	$(BIN)/python tools/write_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

# Damaged and hostile input against all that reads what others send: wire format, machines, terms, proposals, Flower's
# replies, the tracker's API. Some hours; `make fuzz COUNT=10000` is a few minutes, `TARGETS=flower` one of them.
COUNT ?= 1000000
TARGETS ?=
fuzz: .venv/.installed-dev
	$(BIN)/python tests/fuzz $(TARGETS) --count $(COUNT) --seed 1

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "niss needs Python 3.11 or newer; say which: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing niss and torch into .venv: a few minutes, the first time only"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "installing the tools for tests into .venv: a few minutes, the first time only"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
