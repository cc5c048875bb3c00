# Everything here works on a fresh machine with Python 3.11+, make and pip.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast test-deploy lint hooks bench study clean

demo: .venv/ready
	$(BIN)/harmonium demo

test: .venv/ready lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Some seconds, for before a commit.
test-fast: .venv/ready
	$(BIN)/python -m pytest tests/core tests/recipe/test_recipe.py tests/test_hygiene.py tests/test_layers.py

# All deployments, kills and sizes: about a quarter of an hour. nginx and, as root, ip are used if they are here.
test-deploy: .venv/ready
	$(BIN)/python -m pytest -m 'deploy or not deploy' tests/deploy --table docs/results/deployment.md

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A git hook that runs lint and the fast tests before every commit, without the tool pre-commit.
hooks:
	printf '#!/bin/sh\nexec make lint test-fast\n' > "$$(git rev-parse --git-path hooks)/pre-commit"
	chmod +x "$$(git rev-parse --git-path hooks)/pre-commit"

# benchmarks/performance.py runs some of the others and makes a page of them.
bench: .venv/ready
	for bench in $(filter-out %/performance.py,$(wildcard benchmarks/*.py)); do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

# A claim of a paper, tested: make study STUDY=smoke. `harmonium study` lists them.
STUDY ?= smoke
study: .venv/ready
	$(BIN)/harmonium study $(STUDY) --jobs 2

# Any build of torch will do, as will torchvision beside it. A build that is in .venv already stays
# if its version is that of constraints.txt, whatever follows its plus sign (+cpu, +cu126, +rocm6.4).
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
