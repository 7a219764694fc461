# make run    install into .venv and run the main job          make lint      ruff, mypy, clang-format
# make test   C++ tests (doctest), then pytest                 make sanitize  C++ tests under ASan + UBSan, and TSan
# make format rewrite sources in the house style               make wheel     a wheel for other machines, into dist
# make docs   the site, into build/site; warnings are errors
# make clean  remove .venv, build, dist and caches
#
# PYTHON=python3.12      another interpreter for .venv         EXTRAS=torch,mpi   more extras for make test
# CXX=clang++            another compiler; .venv remembers both until make clean
# JOBS=4                 so many compilers, and so many pytest processes, side by side; 2 by default
# RUN_ARGS="--ranks 2"   arguments of the main job             PYTEST_ARGS="-k fp8"

VENV := .venv
-include $(VENV)/made-with.mk

PYTHON ?= $(or $(MADE_WITH_PYTHON),python3)
ifeq ($(origin CXX),default)
CXX := $(or $(MADE_WITH_CXX),g++)
endif
JOBS ?= 2
EXTRAS ?=
RUN_ARGS ?=
PYTEST_ARGS ?=

# A build folder keeps its compiler and .venv its interpreter, whatever is asked for later.
ifneq ($(MADE_WITH_PYTHON),)
ifneq ($(PYTHON) and $(CXX),$(MADE_WITH_PYTHON) and $(MADE_WITH_CXX))
ifneq ($(MAKECMDGOALS),clean)
$(error $(VENV) was made with PYTHON=$(MADE_WITH_PYTHON) CXX=$(MADE_WITH_CXX), this is PYTHON=$(PYTHON) CXX=$(CXX); make clean first)
endif
endif
endif

BIN := $(VENV)/bin
APT_PYTHON := $(or $(filter python3%,$(notdir $(PYTHON))),python3)
comma := ,
TEST_EXTRAS := test$(if $(EXTRAS),$(comma)$(EXTRAS))
TEST_STAMP := $(VENV)/stamp-$(subst $(comma),-,$(TEST_EXTRAS))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml CMakeLists.txt $(wildcard README.md LICENSE) $(shell find src cpp -type f -not -path '*/__pycache__/*')
CXX_FILES := $(filter %.cc %.hpp %.cuh,$(SOURCES))
export PATH := $(CURDIR)/$(BIN):$(PATH)
export CXX

# $(call install,extras): built in one folder for good, so that only what changed is compiled.
install = @echo "installing expertwire$(if $(1),[$(1)]) into $(VENV)"; SKBUILD_BUILD_DIR=build/python $(PIP_INSTALL) --no-build-isolation ".$(if $(1),[$(1)])" && touch $(VENV)/stamp-package

# $(call cxx_tests,folder,cmake options)
cxx_tests = @echo "C++ tests in build/$(1)"; mkdir -p build; \
	cmake -S . -B build/$(1) -G Ninja -DEXPERTWIRE_TESTS=ON -DEXPERTWIRE_WERROR=ON $(2) >build/$(1).log \
	&& cmake --build build/$(1) -j $(JOBS) >>build/$(1).log || { cat build/$(1).log; exit 1; }; \
	ctest --test-dir build/$(1) --output-on-failure --no-tests=error

# Whether the compiler finds what the C++ tests stand on, wherever it looks; and what to say if not.
has_doctest = $(shell $(CXX) -x c++ -E -include doctest/doctest.h /dev/null >/dev/null 2>&1 && echo yes)
NO_CXX_TESTS := C++ tests are left out: they need doctest; install it as root: apt-get install doctest-dev

SANITIZE_FLAGS := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1"

.PHONY: run test lint format sanitize wheel docs clean
.DELETE_ON_ERROR:

run: $(VENV)/stamp-package
	$(BIN)/expertwire run $(RUN_ARGS)

test: $(TEST_STAMP)
	$(if $(has_doctest),$(call cxx_tests,cpp,-DCMAKE_BUILD_TYPE=Release),@echo "$(NO_CXX_TESTS)")
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)
	$(if $(has_doctest),,@echo "$(NO_CXX_TESTS)")

lint: $(VENV)/stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo clang-format --dry-run; $(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/stamp-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	@echo clang-format -i; $(BIN)/clang-format -i $(CXX_FILES)

sanitize: $(VENV)/stamp-venv
	$(if $(has_doctest),,@echo "sanitize runs the C++ tests, which need doctest; install it as root: apt-get install doctest-dev" >&2; exit 1)
	$(call cxx_tests,asan,$(SANITIZE_FLAGS) -DEXPERTWIRE_SANITIZE=address$(comma)undefined)
	$(call cxx_tests,tsan,$(SANITIZE_FLAGS) -DEXPERTWIRE_SANITIZE=thread)

# Named after the oldest system that it can run on, which depends on the compiler's run-time.
wheel: $(VENV)/stamp-dev
	rm -rf build/wheel dist
	SKBUILD_BUILD_DIR=build/python $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

docs: $(VENV)/stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/stamp-package: $(VENV)/stamp-venv $(SOURCES)
	$(call install)

$(TEST_STAMP): $(VENV)/stamp-venv $(SOURCES)
	$(call install,$(TEST_EXTRAS))
	@touch $@

$(VENV)/stamp-dev: $(VENV)/stamp-venv pyproject.toml
	$(call install,dev)
	@touch $@

$(VENV)/stamp-docs: $(VENV)/stamp-venv pyproject.toml
	$(call install,docs)
	@touch $@

# The environment holds what building needs, too: scikit-build-core names cmake and ninja if this machine lacks them.
$(VENV)/stamp-venv: pyproject.toml
	@need=; found() { command -v "$$2" >/dev/null || test "$$2" = "$$3" || { echo "$$1=$$2: not found" >&2; exit 1; }; }; \
	found PYTHON "$(PYTHON)" python3; found CXX "$(firstword $(CXX))" g++; \
	if ! command -v $(PYTHON) >/dev/null; then need=" python3 python3-venv python3-dev"; else \
		$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python >= 3.10 is needed, $(PYTHON) is %d.%d; name another one with PYTHON=" % sys.version_info[:2])' || exit 1; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || need="$$need $(APT_PYTHON)-venv"; \
		test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || need="$$need $(APT_PYTHON)-dev"; \
	fi; \
	command -v $(firstword $(CXX)) >/dev/null || need="$$need g++"; \
	test -z "$$need" || { echo "This machine lacks what building needs; install it as root: apt-get install$$need" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV)
	@printf '%s\n' 'MADE_WITH_PYTHON := $(PYTHON)' 'MADE_WITH_CXX := $(CXX)' >$(VENV)/made-with.mk
	@grep '^requires = ' pyproject.toml | grep -o '"[^"]*"' | xargs $(PIP_INSTALL)
	@$(BIN)/python -c 'from scikit_build_core.build import *; [print(line) for line in get_requires_for_build_wheel()]' \
		| xargs --no-run-if-empty -d '\n' $(PIP_INSTALL)
	@touch $@
