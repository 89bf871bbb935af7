# make setup   .venv in this checkout, once
# make demo    watch a hybrid model reuse a long document
# make check   ruff, mypy --strict, import-linter
# make test    the test suite
# make wheel-check  the wheel, without torch, on every Python that is here
# make gpu-check   verify-model for five families on CUDA (says so when there is no CUDA device)

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.kvloom-setup

# Threads that wait by spinning are several times slower when the cores have other work too.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo check test gpu-check wheel-check
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	bash tools/setup.sh $(VENV)
	@touch $@

demo: setup
	$(BIN)/kvloom demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: setup
	$(BIN)/pytest

gpu-check: setup
	$(BIN)/python tools/gpu_check.py

wheel-check: setup
	bash tools/wheel_check.sh
