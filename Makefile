# Everything a newcomer needs: `make serve`, `make test`. The rest is for people who change the code.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
LINT   := $(VENV)/.installed-lint
PIP    := $(BIN)/python -m pip --disable-pip-version-check

KERNELS := tureen/kernels/cpu
BUILD   := build/native
CLIENTS := build/clients

PORT  ?= 30000
MODEL ?=
ARGS  ?=

.PHONY: help install native serve test test-servers test-ledgers test-all test-clients test-shelf test-isas test-busy costs check check-native fix bench gpu-check wheel lock release first-run docs docs-site soak-sim fuzz coverage mutants chaos soak clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## create .venv and install tureen into it

define make_venv
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"tureen needs Python 3.11 or later, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11 …")'
@test -x $(BIN)/python || { echo 'installing into $(VENV): about a minute, docs/first-run.md has figures'; $(PYTHON) -m venv $(VENV); }
@$(SHOWN) $(PIP) install --constraint constraints.txt $$($(BIN)/python tools/requires.py)
endef

# The packages are fetched while the kernels compile.
$(STAMP): pyproject.toml constraints.txt
	$(make_venv)
	@$(BIN)/python tools/requires.py --run > $(VENV)/requires.txt
	@$(SHOWN) sh -c '$(PIP) install --constraint constraints.txt --requirement $(VENV)/requires.txt & packages=$$!; \
		$(INSTALL) --no-deps --verbose --config-settings=cmake.define.TUREEN_ISAS=$(ISAS) --editable . && wait $$packages'
	@$(BIN)/python -c 'from tureen.kernels.cpu import native; native.load() or print(native.MISSING)'
	@$(BIN)/python -m compileall -q tureen  # where PYTHONDONTWRITEBYTECODE is set, every start would compile
	@touch $@

# The instruction sets that the kernels are compiled for: this processor's, or all for development.
ISAS = here

# In .venv, not in one that pip makes for each build: only so is a build a continuation of the last.
INSTALL = $(PIP) install --constraint constraints.txt --no-build-isolation --config-settings=build-dir=$(BUILD)
SHOWN   = $(BIN)/python tools/show_progress.py

native: $(STAMP) ## build the native kernels again; the tests do so by themselves
	@test ! -f $(BUILD)/build.ninja || $(BIN)/cmake --build $(BUILD) -- --quiet
	@if test ! -f $(BUILD)/build.ninja || test $(BUILD)/_native*.so -nt $(VENV)/lib/python3.1*/site-packages/$(KERNELS)/_native*.so; \
		then $(INSTALL) --quiet --no-deps --editable .; fi

# For $(STAMP), too, where there is none yet: so a clean clone compiles the kernels once.
$(DEV): ISAS = all
$(DEV): $(STAMP)
	@$(SHOWN) $(INSTALL) --verbose --config-settings=cmake.define.TUREEN_ISAS=$(ISAS) --editable '.[dev]'
	$(PIP) install --quiet --no-deps --constraint constraints.txt xgrammar apache-tvm-ffi  # with dependencies it brings gigabytes
	@touch $@

# All that `make check` needs: no kernels.
$(LINT): pyproject.toml constraints.txt
	$(make_venv)
	@$(SHOWN) $(INSTALL) --verbose --config-settings=wheel.cmake=false --editable '.[dev]'
	@touch $@

serve: $(STAMP) ## start the server on 127.0.0.1:$(PORT); MODEL=, ARGS= override
	@$(BIN)/tureen serve --port $(PORT) $(if $(MODEL),--model-path '$(MODEL)') $(ARGS)

# In two processes, each with whole files; three for servers, which also wait. ARGS=-n0 makes it one.
# Where PYTHONDONTWRITEBYTECODE is set, every start would rewrite every assertion.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(DEV) native ## the gate: all tests that need no other process
	@$(PYTEST) $(ARGS)

test-servers: $(DEV) native ## real servers and processes; a failed test runs once more; ARGS=tests/servers/browser
	@$(PYTEST) --numprocesses 3 --reruns 1 $(or $(ARGS),tests/servers)

test-ledgers: $(DEV) native ## the large tables, where what they guard has changed; ARGS=--list only says which
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python tools/ledgers.py $(ARGS)

test-all: test test-servers check-native test-isas ## every lane, whatever has changed
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python tools/ledgers.py --all --passed

costs: $(DEV) ## put the seconds of the last whole runs of the lanes into tests/costs.json
	@$(BIN)/python tests/costs.py

soak-sim: $(DEV) native ## simulate the whole server under more seeds; ARGS='first count'
	@$(BIN)/python tests/sim/run.py $(or $(ARGS),300 3000)

# atheris has no wheels for every processor; it is wanted here only.
fuzz: $(DEV) native ## fuzz what reads strangers' bytes, a minute each; ARGS='gguf 600'
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install --quiet atheris
	@$(BIN)/python tests/fuzz/run.py $(ARGS)

chaos: $(DEV) native ## freeze, kill, starve each process of a server in mid-stream; ARGS='seed more'
	@$(BIN)/python tools/chaos.py $(ARGS)

soak: $(DEV) native ## load for a number of seconds: nothing may grow; ARGS=seconds
	@$(BIN)/python tools/soak.py $(ARGS)

coverage: $(DEV) native ## branch coverage of what keeps the books; ARGS='quotas'
	@$(BIN)/python tools/coverage_table.py $(ARGS)

mutants: $(DEV) native ## whether the tests notice changed operators and constants; ARGS='quotas'
	@$(BIN)/python tools/mutants.py $(ARGS)

check: $(or $(wildcard $(DEV)),$(LINT)) ## format, lint, types, import rules, sizes, ratchets
	@$(BIN)/ruff format --check --quiet . || { echo 'run: make fix'; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python tools/import_rules.py
	@$(BIN)/python tools/budget.py
	@$(BIN)/python tools/ratchets.py
	@$(BIN)/clang-format --dry-run --Werror $(KERNELS)/src/*.* $(KERNELS)/src/isa/* tests/kernels/models/*.cpp tests/kernels/models/*.h || { echo 'run: make fix'; exit 1; }
	@echo 'check: all good'

# Environments of their own: clients want other versions than the server's tests and than each other, and gigabytes that nobody needs.
test-clients: $(STAMP) ## clients of other projects against a real server; ARGS='crewai node' runs some, --record keeps what they send
	@test -x $(CLIENTS)/bin/python || { $(PYTHON) -m venv $(CLIENTS) && $(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet uv; }
	@$(CLIENTS)/bin/python tools/test_clients.py $(ARGS)

test-shelf: $(DEV) native ## start each known model once in each engine mode; ARGS='minilm process' starts some
	@$(BIN)/python tools/test_shelf.py $(ARGS)

check-native: $(DEV) native ## tests of the native kernels with sanitizers, and as other processors run them
	@$(BIN)/python tools/check_native.py $(ARGS)

test-isas: $(DEV) native ## what depends on instruction sets, under each that this machine has
	@$(BIN)/python tools/test_isas.py $(ARGS)

test-busy: $(DEV) native ## what depends on time, beside eight busy loops; ARGS=tests for everything
	@$(BIN)/python tools/test_busy.py $(ARGS)

fix: $(DEV) ## format and repair what can be repaired by a tool
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/clang-format -i $(KERNELS)/src/*.* $(KERNELS)/src/isa/* tests/kernels/models/*.cpp tests/kernels/models/*.h

bench: $(STAMP) ## measure a running server; ARGS='--workload single --url …'
	@$(BIN)/tureen bench $(ARGS)

wheel: $(DEV) ## wheels for each Python found, into dist/, each tested in an empty environment; ARGS='3.11 3.13'
	@$(BIN)/python tools/wheels.py $(ARGS)

lock: $(DEV) ## pin the installed versions in constraints.txt, and hash them in requirements-hashed.txt; needs uv
	@$(BIN)/python tools/lock.py

release: $(DEV) ## version, CHANGELOG from changes/, wheels, sources; VERSION=1.2.0
	@$(BIN)/python tools/release.py $(VERSION)

first-run: $(DEV) ## a first run from a clean clone, with a compiler and nothing cached, timed
	@$(BIN)/python tests/first_run/first_run.py --compile

gpu-check: $(DEV) ## kernels, speed, seeds and parity tests on a CUDA device, where there is one
	@$(BIN)/python tools/gpu_check.py $(ARGS)

docs: $(DEV) ## write the pages that derive from the code: parameters, settings
	@$(BIN)/python tools/docs.py

docs-site: $(DEV) ## the documentation as a site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/site/index.html

clean: ## remove what was built here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
