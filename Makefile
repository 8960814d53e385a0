PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help install test test-full test-oldest test-newest lint format

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F ':.*  ## ' '{printf "  %-11s %s\n", $$1, $$2}'

install:  ## install the package, editable, with what development needs
	$(PYTHON) -m pip install -e ".[dev]"

test:  ## run the quick tests, without a GPU
	$(PYTHON) -m pytest

test-full:  ## run every test that needs no GPU, those of the compiler and slow ones too
	$(PYTHON) -m pytest -m "not gpu and not ncu"

test-oldest: PAIR = torch==2.11.0 triton==3.6.0
test-oldest:  ## run the quick tests with the oldest torch and Triton that are supported
	$(with_pair)

test-newest: PAIR = torch==2.13.0 triton==3.9.0
test-newest:  ## run the quick tests with the newest torch and Triton
	$(with_pair)

define with_pair
$(PYTHON) -m venv --clear build/$@
build/$@/bin/pip install --quiet -e ".[dev]" $(firstword $(PAIR))
build/$@/bin/pip install --quiet $(PAIR)
build/$@/bin/python -m pytest
endef

lint:  ## check style, format and types; in tests and benchmarks, only that calls have the arguments that functions take
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --config-file tests/mypy.ini

format:  ## mend style and format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
