# Everything a developer needs. `make setup` is implied by the others and does nothing when nothing changed.
PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PROCESSES := tests/e2e tests/multi/faults tests/docs tests/multi/training tests/multi/serving tests/multi
BESIDE := tests/fuzz tests/unit/planner tests/parity/planner tests/parity/recovery tests/house
KERNELS := $(wildcard src/tllm/kernels/csrc/*) src/tllm/kernels/instruction_sets.py
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# In one order and with one seed, so that a commit passes always or never; pytest alone and `make soak` take others.
SAME := --randomly-seed 1
TORCH := $(shell sed -n 's/^\(torch==.*\)$$/\1/p' requirements.lock)

# What one process of a test has compiled is there for the next, whatever the caller's shell says of it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-numbers test-apart test-beside test-devices test-processes test-masked test-stalled check fix docs bench soak soak-numbers soak-processes soak-properties gpu tiny-model clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(VENV)/.runtime  ## Make .venv with the tllm command in .venv/bin
	@:

demo: $(VENV)/.runtime  ## Split the tiny model over three processes here and stream a completion
	@$(BIN)/tllm demo

test: test-numbers test-apart  ## Run the tests

# Three at a time fill two cores: the ranks of a test are threads that wait for each other a fifth of its time.
test-numbers: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not soak" $(SAME) --numprocesses 3 $(PROCESSES:%=--ignore=%) $(BESIDE:%=--ignore=%) \
		--ignore=tests/devices $(PYTEST_ARGS)

test-apart: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 test-processes test-beside

# What tests with processes leave of two cores these take: those of devices, of fuzzing, which start no process, then some
# of numbers. All but the first are for two processes: on a slow processor most tests with processes are left out, and one
# would work on alone long after those. House tests come last, as the trees that they keep make full collections long.
test-beside: $(VENV)/.dev
	@status=0; $(MAKE) --no-print-directory test-devices || status=$$?; \
		$(BIN)/python -m pytest -m "not soak" $(SAME) --numprocesses 2 --dist loadfile --no-loadscope-reorder $(BESIDE) \
		$(PYTEST_ARGS) || status=$$?; exit $$status

# Apart from all others: who imports these has a second device for the rest of the process.
test-devices: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not soak" $(SAME) tests/devices $(PYTEST_ARGS)

# Each file of these starts its processes once, so it stays in one place. Folders of few and long tests come first: a file
# that began last would keep one core alone. Variants of what is proved here are in `make soak`.
test-processes: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not soak" $(SAME) --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		$(PROCESSES) $(PYTEST_ARGS)

# As on a processor without AVX: our kernels and torch's libraries, in child processes too. MASK=avx2 hides AVX-512.
MASK ?= generic
TESTS ?= tests/unit/kernels tests/unit/engine/compute tests/unit/quantization tests/unit/parallel tests/parity/engine \
	tests/parity/model/test_gguf_families.py tests/parity/model/test_quantized_folders.py \
	tests/multi/faults/test_few_bits_recovery.py
MASKS_generic := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
MASKS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
test-masked: $(VENV)/.dev  ## Tests of numbers with the processor's features masked (MASK=generic|avx2, TESTS=...)
	@env TLLM_KERNELS=$(MASK) $(MASKS_$(MASK)) $(BIN)/python -m pytest -m "not soak" $(TESTS) $(PYTEST_ARGS)

# A test that passes only while each thread has a core is found here, and not weeks later on a busy machine.
test-stalled: $(VENV)/stalled_threads.so  ## The tests while threads of every process lose their core now and then (TESTS=...)
	@export LD_PRELOAD=$(abspath $<); $(if $(filter file,$(origin TESTS)),$(MAKE) --no-print-directory --keep-going test, \
		$(BIN)/python -m pytest -m "not soak" $(SAME) $(TESTS) $(PYTEST_ARGS))

$(VENV)/stalled_threads.so: tests/support/stalled_threads.c | $(VENV)/.dev
	@$(BIN)/python -m ziglang cc -std=c11 -O1 -shared -fPIC -pthread $< -o $@ -lm

check: $(VENV)/.dev  ## Format, lint, types, house rules and unit tests: minutes
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest tests/house tests/unit $(PYTEST_ARGS)

fix: $(VENV)/.dev  ## Repair what `make check` finds and a machine can mend
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

# Read anew each time: a page that was warned of is warned of again until it is mended.
docs: $(VENV)/.docs  ## Build the documentation site into docs/_build/html
	@$(BIN)/python -m sphinx --builder html --fresh-env --nitpicky --fail-on-warning --keep-going --quiet \
		--conf-dir docs --doctree-dir docs/_build/doctrees . docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(VENV)/.dev  ## Repeat the benchmarks; results go to benchmarks/*/results
	@$(BIN)/python -m benchmarks

gpu: $(VENV)/.dev  ## The tests of a CUDA device (skipped by name where there is none)
	@$(BIN)/python -m pytest tests/gpu -rs $(PYTEST_ARGS)

soak: soak-numbers soak-processes soak-properties  ## What runs for minutes, the rest of every table, other examples

soak-numbers: $(VENV)/.dev
	@$(BIN)/python -m pytest -m soak --numprocesses 2 $(PROCESSES:%=--ignore=%) --ignore=tests/devices $(PYTEST_ARGS)

# One at a time: some make machines of their own, or count on a core.
soak-processes: $(VENV)/.dev
	@$(BIN)/python -m pytest -m soak $(PROCESSES) $(PYTEST_ARGS)

# Examples that nobody has tried: in `make test` properties meet the same ones each time, so that a commit passes always
# or never. What is found here becomes an @example.
soak-properties: $(VENV)/.dev
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile random --timeout 3600 --numprocesses 2 tests/house \
		tests/unit tests/multi/comm tests/fuzz $(PYTEST_ARGS)

tiny-model: $(VENV)/.dev  ## Train the tiny model again from the standard library's text
	@$(BIN)/python -m tllm.recipes.tiny_model models/tiny

clean:  ## Remove .venv and every cache
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build docs/_build src/*.egg-info src/tllm/kernels/lib
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11"; echo "hint: make PYTHON=/path/to/python3.11 setup"; exit 2; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# pip takes one core, and the compiler what is left. Two of pip at once would be in each other's way.
PACKAGES := $(VENV)/.packages
$(VENV)/.runtime: requirements.lock requirements-build.lock pyproject.toml setup.py $(KERNELS) | $(BIN)/python
	@$(PIP) --requirement requirements-build.lock
	@$(MAKE) --no-print-directory --jobs 2 $(PACKAGES) $(VENV)/.kernels
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# torch comes first and on its own: a build that this machine already offers (CPU only, say) is then taken as it is.
$(VENV)/.packages: requirements.lock | $(BIN)/python
	@echo "installing requirements.lock"
	@$(PIP) "$(TORCH)" --constraint requirements.lock
	@$(PIP) --requirement requirements.lock
	@touch $@

$(VENV)/.kernels: requirements-build.lock setup.py $(KERNELS) | $(BIN)/python
	@echo "compiling the kernels"
	@$(BIN)/python -c "import setup; setup.compile_kernels()"
	@touch $@

# What tests need is installed while the kernels are compiled, too.
$(VENV)/.dev: requirements.lock requirements-dev.lock requirements-build.lock pyproject.toml setup.py $(KERNELS)
	@$(MAKE) --silent PACKAGES=$(VENV)/.dev-packages $(VENV)/.runtime
	@$(MAKE) --silent $(VENV)/.dev-packages
	@touch $@

# Without bytecode, which is written when a module is first imported: most of these never are, and to compile them takes
# pip longer than all else.
$(VENV)/.dev-packages: requirements-dev.lock $(VENV)/.packages
	@echo "installing requirements-dev.lock"
	@$(PIP) --no-compile --requirement requirements.lock --requirement requirements-dev.lock
	@touch $@

$(VENV)/.docs: requirements-docs.lock $(VENV)/.runtime
	@echo "installing requirements-docs.lock"
	@$(PIP) --no-compile --requirement requirements.lock --requirement requirements-docs.lock
	@touch $@
