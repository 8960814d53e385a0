PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help install test test-full test-gpu lint format types demo clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F ':.*  ## ' '{printf "  %-10s %s\n", $$1, $$2}'

install:  ## install the package, editable, with what development needs
	$(PYTHON) -m pip install -e ".[dev]"

test:  ## run the quick tests, without a GPU
	$(PYTHON) -m pytest

test-full:  ## run every test that needs no GPU, those of the compiler and slow ones too
	$(PYTHON) -m pytest -m "not gpu and not ncu"

test-gpu:  ## run the tests that need an NVIDIA GPU
	$(PYTHON) -m pytest -m gpu -n 0

lint:  ## check style and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format:  ## mend style and format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types:  ## check types; in tests and benchmarks, only that calls have the arguments that functions take
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --config-file tests/mypy.ini

demo:  ## run the main job on the built-in model
	$(PYTHON) -m ssdprof run demo

clean:  ## remove caches and build outputs; runs/ stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find ssdprof tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
