# One command on a fresh machine is enough: every target makes and reuses the virtual environment.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready

.PHONY: demo live-demo test test-ray test-trackers soak live-soak ray-soak lint bench docs clean

demo: $(READY)
	$(VENV)/bin/offbeat compare --config examples/demo.toml --out demo --overwrite

live-demo: $(READY)
	$(RUN) examples/live_demo.py live-demo

test: lint
	$(RUN) -m pytest -m "not slow and not soak and not ray and not trackers" -n auto --dist worksteal

test-ray: $(READY)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,ray]"
	$(RUN) -m pytest -m "ray and not soak"

ray-soak: $(READY)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,ray]"
	$(RUN) -m pytest -m "ray and soak" -s

test-trackers: $(READY)
	$(RUN) -m pip install --quiet --constraint constraints.txt ".[trackers]"
	$(RUN) -m pytest -m trackers

soak: $(READY)
	$(RUN) -m pytest -m "soak and not ray" -s --ignore-glob 'tests/test_live*'

live-soak: $(READY)
	$(RUN) -m pytest -m soak -s tests/test_live.py tests/test_live_wire.py tests/test_live_trials.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

bench: $(READY)
	$(VENV)/bin/offbeat bench --out bench.json

docs: $(READY)
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	$(RUN) -m sphinx -W --keep-going -b html docs docs/_build/html

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt setuptools
	$(RUN) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo live-demo
