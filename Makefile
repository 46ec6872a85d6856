.DEFAULT_GOAL := help
PYTHON ?= python

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

test: ## run the tests
	$(PYTHON) -m pytest

lint: ## check style and types
	$(PYTHON) -m ruff check src tests scripts benchmarks
	$(PYTHON) -m ruff format --check src tests scripts benchmarks
	$(PYTHON) -m pyright --pythonpath $(shell $(PYTHON) -c "import sys; print(sys.executable)")

format: ## rewrite the code in the project's style
	$(PYTHON) -m ruff format src tests scripts benchmarks
	$(PYTHON) -m ruff check --fix src tests scripts benchmarks

bench: ## measure the backends against each other
	$(PYTHON) benchmarks/crossover.py
	$(PYTHON) benchmarks/neighborhood.py

sanitize: ## run the tests of the operators with the kernel built for the address and undefined-behaviour sanitizers
	cmake -S . -B build/sanitize -DFIBOTTENTION_SANITIZE=ON -DCMAKE_BUILD_TYPE=Release
	cmake --build build/sanitize
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	FIBOTTENTION_KERNEL=build/sanitize/libfibottention_kernel.so $(PYTHON) -m pytest tests/ops -p no:cacheprovider

docs: ## build the documentation site into site/
	$(PYTHON) -m mkdocs build --strict

.PHONY: help test lint format bench sanitize docs
