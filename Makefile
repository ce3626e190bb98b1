PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test lint slow lowest newest matrix clean

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
	$(BIN)/pytest -n0 -m slow

# Both ends of what is supported, each in an environment of its own: make matrix, or
# make lowest PYTHON=python3.11; make newest PYTHON=python3.14
matrix: lowest newest

lowest: PICK := --constraint lowest.txt --editable '.[demo,test]'
newest: PICK := --editable '.[demo,test,works,torchao]'
lowest newest:
	test -x .venv-$@/bin/python || $(PYTHON) -m venv .venv-$@
	.venv-$@/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(PICK)
	.venv-$@/bin/python -m pytest

.venv/%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv .venv-lowest .venv-newest demo-model
