# `make demo` and `make test` set everything up by themselves; when nothing changed they start at once.

PYTHON ?= python3
# pip's index of torch's CPU builds, as pytorch.org gives it; without it pip may bring 2.7 GB of CUDA
TORCH_INDEX ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
FOLDERS := profiles models emulator flower analysis api cli

.DEFAULT_GOAL := help
.PHONY: help demo test lint types clean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## run three methods on eight emulated boards and write a report (about 4 minutes on 2 free cores)
	$(BIN)/fleetbed doctor
	folder=$$($(BIN)/fleetbed run small-boards) && $(BIN)/fleetbed report $$folder --out $$folder/report.html

test: $(INSTALLED) ## run the quick tests (.ci/run runs all of them)
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(INSTALLED) ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED) ## check the types
	$(BIN)/mypy -p fleetbed

clean: ## remove what was installed and built, but not your runs or the cache in your home
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Last of all the stamp, so that an installation that was interrupted is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else \
		"fleetbed needs Python 3.10 or newer, but $(PYTHON) is %d.%d: make PYTHON=/path/to/another" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing into .venv; the first time takes a few minutes"
	$(PIP) install --quiet -c constraints.txt setuptools
	$(if $(TORCH_INDEX),$(PIP) install --quiet -c constraints.txt --index-url $(TORCH_INDEX) torch torchvision)
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
