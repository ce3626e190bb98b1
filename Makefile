PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test lint slow clean

demo: .venv/demo
	$(BIN)/collabify analyze demo
	$(BIN)/collabify convert demo --dk 256 --out demo-model --overwrite
	$(BIN)/python examples/compare.py demo demo-model

test: .venv/dev
	$(MAKE) lint
	$(BIN)/pytest

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: .venv/dev
	$(BIN)/pytest -m slow

.venv/%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv demo-model
