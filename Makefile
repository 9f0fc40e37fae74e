# Each target sets up what it needs in .venv and does nothing twice. `make` alone lists the targets.
# trl lies beside the packages of .venv, not among them: verl 0.9 does not start where trl can be imported.
PYTHON ?= python3.11
TRAINER ?= verl
EXTRAS := verl demo test
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEPS := $(VENV)/deps.stamp
BUILD := $(VENV)/build.stamp
TRL := $(VENV)/trl
SOURCES := setup.py MANIFEST.in pyproject.toml $(shell find csrc -name '*.[ch]')

# Isolated builds obey the constraints too; newer pips read the second name, older ones the first.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

REQUIREMENTS := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["dependencies"], *(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra]), sep="\n")

.PHONY: help setup demo test lint bench clean distclean

help:
	@echo "make demo   train SmolLM2-135M in verl, flag off, on and stock; check every claim (out/demo); TRAINER=trl: in TRL"
	@echo "make test   run the test suite"
	@echo "make lint   ruff, mypy, stubtest, clang-format"
	@echo "make bench  measure hook, kernel and training step (out/bench)"
	@echo "make setup  only create .venv and build the extension"
	@echo "make clean  remove what was built (distclean: .venv and out too)"

setup: $(BUILD)

demo: $(BUILD)
	@$(if $(filter trl,$(TRAINER)),PYTHONPATH=$(TRL)) $(BIN)/python -m bwdfuse demo --trainer $(TRAINER)

test: $(BUILD)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(BUILD)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest bwdfuse._C
	$(BIN)/clang-format --dry-run -Werror $(filter %.c %.h,$(SOURCES))

bench: $(BUILD)
	@mkdir -p out/bench
	$(BIN)/python -m benchmarks.bench_kernel --json out/bench/kernel.json
	$(BIN)/python -m benchmarks.bench_hook --json out/bench/hook.json
	$(BIN)/python -m benchmarks.bench_train --only M/ --json out/bench/train.json

clean:
	rm -rf build dist *.egg-info bwdfuse/_C*.so $(BUILD) out/demo out/ci out/bench

distclean: clean
	rm -rf $(VENV) out

$(DEPS): pyproject.toml constraints.txt
	@echo "· creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(REQUIREMENTS)' $(EXTRAS) > $(VENV)/requirements.txt
	@echo "· installing $$(wc -l < $(VENV)/requirements.txt) requirements and what they need (a minute or two)"
	@$(BIN)/python -m pip install -q -r $(VENV)/requirements.txt
	@$(BIN)/python -m pip install -q --no-deps verl
	@$(BIN)/python -m pip install -q --no-deps --target $(TRL) --upgrade trl
	@touch $@

$(BUILD): $(DEPS) $(SOURCES)
	@echo "· building the extension"
	@$(BIN)/python -m pip install -q --no-deps -e .
	@touch $@
