# Everything here works on a fresh machine with Python 3.11+, make and pip.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-deploy lint bench clean

demo: .venv/ready
	$(BIN)/harmonium demo

test: .venv/ready lint
	$(BIN)/python -m pytest -n 2

# All deployments, kills and sizes: about a quarter of an hour. nginx and, as root, ip are used if they are here.
test-deploy: .venv/ready
	$(BIN)/python -m pytest -m 'deploy or not deploy' tests/deploy --table docs/results/deployment.md

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	for bench in benchmarks/*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

# torch comes first and by its exact version: a looser request would bring gigabytes of CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@! $(BIN)/python -m pip list 2>/dev/null | grep -iE '^(nvidia-|torchvision)' \
		|| (echo 'CUDA packages or torchvision were installed: see constraints.txt' && exit 1)
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
