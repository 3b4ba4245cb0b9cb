# `make test` and `make demo` need nothing but Python 3.11 and make: they set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
BENCHMARKS ?= benchmarks/scan.py benchmarks/optim.py benchmarks/models.py
# Some virtual CPUs advertise AMX but fault on it; capping oneDNN's instruction set avoids that.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help test demo check bench docs site bill hashes clean
help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

test: .venv/.ready  ## Set up, then lint, type-check and run the tests
	$(MAKE) --no-print-directory check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

demo: .venv/.ready  ## Set up, then run the main job
	$(BIN)/nestling demo --out runs/demo

check: .venv/.ready  ## Lint, formatting, types and layer order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/.ready  ## Measure speed; every script prints ratios from one run
	@for f in $(BENCHMARKS); do echo "== $$f"; $(BIN)/python $$f || exit 1; done

docs: .venv/.ready  ## Generate docs/equations.md
	$(BIN)/python -m nestling.paper.registry --write docs/equations.md

site: .venv/.ready  ## Build the documentation site, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

bill: .venv/.ready  ## Print what is installed, as CycloneDX JSON
	@$(BIN)/nestling doctor --bill

hashes: .venv/.ready  ## Ask the package index for the hashes of all pins: hashes.txt
	$(BIN)/python .ci/hashes.py --write $(if $(PIP_FIND_LINKS),--wheels $(PIP_FIND_LINKS))

clean:  ## Remove the environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
