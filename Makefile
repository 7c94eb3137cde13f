# make serve | make test | make demo | make bench   -- each sets up .venv first
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup serve test lint demo bench test-compose protos descriptors clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py protos/generate.py $(wildcard protos/tokasaurus/*/v1/*.proto)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

serve: setup
	$(BIN)/toka $(ARGS)

test: setup lint
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: setup
	$(BIN)/python -m bench.coverage $(ARGS)

bench: setup
	$(BIN)/python -m bench.serve_cpu $(ARGS)

# Needs a Docker engine with Compose v2 on this host (DOCKER_HOST names it).
test-compose: setup
	$(BIN)/python -m pytest tests/e2e/test_compose.py -m compose --timeout 1800 $(ARGS)

protos: setup
	$(BIN)/python protos/generate.py

# After a compatible change to a contract: commit the new descriptor set with it.
descriptors: setup
	$(BIN)/python protos/generate.py --descriptor-set protos/descriptors.binpb

clean:
	rm -rf $(VENV) build dist *.egg-info
	find protos -name '*_pb2*.py*' -delete
