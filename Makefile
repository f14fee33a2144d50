# Everything a person runs by hand. The first `make serve` or `make test` on a bare machine (Linux, Python
# 3.11 to 3.13, gcc, PyPI) sets up .venv, the pinned dependencies, the compiled ops and the models; later
# calls set up only what has changed since.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
TRITON := requirements/triton.txt
HOST ?= 127.0.0.1
PORT ?= 8000
SERVE_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
NAME := smollm2-135m-instruct
BASE := build/base

OPS_SOURCES := $(shell find csrc cmake -type f 2>/dev/null) CMakeLists.txt setup.py
CPP_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup build models serve test lint format bench-cpu base wheel sdist clean distclean

help:
	@echo "make serve      serve SmolLM2-135M-Instruct at http://$(HOST):$(PORT)"
	@echo "make test       all tests                make lint       every check but the tests"
	@echo "make build      the compiled ops         make format     rewrite sources in house form"
	@echo "make wheel      dist/*.whl               make sdist      dist/*.tar.gz"
	@echo "make models     the two real test models make bench-cpu  compare with CPU peers (minutes)"
	@echo "make base       the engine without hybrid mode, in $(BASE), and its tests"
	@echo "make clean      build products           make distclean  also .venv and .models"

$(VENV)/.created:
	@tools/create_venv.sh $(VENV) $(PYTHON)
	@touch $@

# torch first and pinned, so that no resolver picks another build of it for the range in pyproject.toml.
# Triton before it, for torch without CUDA asks for none, and behind it, for torch with CUDA asks for its
# own, with which the tests did not run.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS) $(TRITON)
	@echo "Installing the pinned dependencies into $(VENV) ..."
	@$(PIP) install --quiet --no-deps --no-warn-conflicts -r $(TRITON)
	@$(PIP) install --quiet -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))" setuptools wheel cmake ninja
	@VLLM_TARGET_DEVICE=empty $(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[test,lint,bench]'
	@$(PIP) install --quiet --no-deps --no-warn-conflicts -r $(TRITON)
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(OPS_SOURCES)
	@echo "Compiling the ops ..."
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.smollm2: $(VENV)/.created tools/real_models.py
	@echo "Fetching SmolLM2-135M-Instruct ..."
	@$(PY) tools/real_models.py fetch smollm2 >/dev/null
	@touch $@

.models/.gemma3: $(VENV)/.created tools/real_models.py
	@echo "Fetching Gemma 3 270M ..."
	@$(PY) tools/real_models.py fetch gemma3 >/dev/null
	@touch $@

setup: $(VENV)/.built

build: $(VENV)/.built

models: $(VENV)/.smollm2 .models/.gemma3

serve: $(VENV)/.built $(VENV)/.smollm2
	@echo "Hybrid mode: $(VENV)/bin/vllm stats --url http://$(HOST):$(PORT)/v1 shows the groups."
	@echo "Starting. When it is ready, try:"
	@echo "  curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"$(NAME)\", \"max_tokens\": 64, \"messages\": [{\"role\": \"user\", \"content\": \"Name three colours.\"}]}'"
	@exec $(VENV)/bin/vllm serve "$$($(PY) tools/real_models.py path smollm2)" \
	  --host $(HOST) --port $(PORT) --served-model-name $(NAME) \
	  --hybrid-mode true --hybrid-config examples/smollm2_hybrid.json $(SERVE_ARGS)

test: $(VENV)/.built models
	@$(PY) -m pytest -m "not gpu and not multi_gpu and not slow" $(TEST_ARGS)

# The series reversed and the owned files gone (patches/README.md).
base: $(VENV)/.built models
	@rm -rf $(BASE)
	@$(PY) -m tools.pq base $(BASE)
	@$(PY) -m tools.pq.base_ops $(BASE)
	@ln -s ../../.models $(BASE)/.models
	@cd $(BASE) && PYTHONPATH="$$PWD" $(CURDIR)/$(PY) -m pytest -m "not gpu and not multi_gpu and not slow" $(TEST_ARGS)

lint: $(VENV)/.built
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(VENV)/bin/lint-imports --no-cache
	$(PY) -m tools.pq verify

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_SOURCES)

bench-cpu: $(VENV)/.built $(VENV)/.smollm2
	$(PY) benchmarks/engine/compare_cpu.py $(BENCH_ARGS)

wheel: $(VENV)/.installed
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) wheel --no-build-isolation --no-deps -w dist .

sdist: $(VENV)/.installed
	@VLLM_TARGET_DEVICE=empty $(PY) -m build --sdist --no-isolation --outdir dist .

clean:
	rm -rf build dist *.egg-info vllm/_C_*.so .pytest_cache .ruff_cache .mypy_cache $(VENV)/.built
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .models
