# `make` lists the targets. Everything runs from the .venv that `make setup` builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
SMOKE := tests/integration/harvest/test_harvester.py::test_concurrent_transactions_arrive_all_once_in_order \
	tests/integration/harvest/test_exactly_once.py::test_every_record_arrives_once_and_in_order
PYTHON6 ?= $(shell for python in python3.14 python3.13 python3.12 python3; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)

# Tests and benchmarks start hundreds of Python processes, each of which would compile the source anew.
unexport PYTHONDONTWRITEBYTECODE
export NO_MKDOCS_2_WARNING := 1  # the site is built with the version that requirements-docs.txt names

.DEFAULT_GOAL := help
.PHONY: help setup lock lint format house protocol docs docs-serve docs-version test test-alone test-again test-quick test-all test-lowest test-django6 python6 costs-accept
.PHONY: test-chaos test-queues chaos chaos-effects simulate spark-faults explore screenshots demo demo-pipeline clean
.PHONY: bench bench-all bench-stash bench-failover bench-latency bench-backlog bench-idle bench-notify bench-snapshot bench-holds
.PHONY: bench-queue bench-queue-budget bench-tracker bench-pipelines bench-tables bench-relay bench-small-topic bench-quota bench-versions bench-retention bench-console bench-pressure

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z_-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# They check the hashes of everyone else, so Python's own pip checks theirs.
define pip_and_uv
	awk '/^(pip|uv)==/ {on = 1} on {print} !/\\$$/ {on = 0}' requirements-dev.txt >$(dir $(1))requirements.txt
	$(1) -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(dir $(1))requirements.txt
endef

setup: $(STAMP)  ## Make .venv with the packages, all extras and the development tools

$(STAMP): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(call pip_and_uv,$(BIN)/python)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --requirement requirements-dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	@touch $@

lock: $(STAMP)  ## Resolve the development tools and all extras anew, and the tools of the site, with hashes
	$(BIN)/python -m uv pip compile pyproject.toml --all-extras --group dev --universal --generate-hashes \
		--upgrade --quiet --no-header --no-emit-index-url --output-file requirements-dev.txt
	$(BIN)/python -m uv pip compile --group docs --universal --generate-hashes \
		--upgrade --quiet --no-header --no-emit-index-url --output-file requirements-docs.txt

lint: $(STAMP)  ## Check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! git grep -nE '^(<{7}|>{7}) '  # what a merge left behind

docs: $(DOCS_STAMP)  ## Build the documentation site into build/site, strictly: any warning is a failure
	$(DOCS)/bin/mkdocs build

docs-serve: $(DOCS_STAMP)  ## Show the documentation site on http://127.0.0.1:8000/, built anew at each change
	$(DOCS)/bin/mkdocs serve

docs-version: $(DOCS_STAMP)  ## Add the site as VERSION=1.2 to the local branch gh-pages, as the latest one
	$(DOCS)/bin/mike deploy --update-aliases $(VERSION) latest
	$(DOCS)/bin/mike set-default latest

$(DOCS_STAMP): requirements-docs.txt | $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(DOCS)
	$(BIN)/uv pip install --quiet --python $(DOCS) --require-hashes --requirement requirements-docs.txt
	@touch $@

house: $(STAMP)  ## Print the sizes of the source; fail for cycles, imports against the direction, docstrings that ask
	$(BIN)/python scripts/house.py

format: $(STAMP)  ## Format the code and apply safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protocol: .protoc  ## Generate the Python code of outbox_queue/protocol/markers.proto
	.protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. outbox_queue/protocol/markers.proto

# A compiler of its own: what 5.26 generates runs with every protobuf from there on, and 5.26 cannot live beside a newer one.
.protoc:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet grpcio-tools==1.63.2

test: $(STAMP)  ## Run the tests against a real Postgres and a real Kafka broker, JOBS=7 at a time
	$(BIN)/pytest -n $(or $(JOBS),7) -m "not alone and not complete"
	$(MAKE) test-alone

test-alone: $(STAMP)  ## Run those of `make test` that want the machine for themselves
	$(BIN)/pytest -n 2 -m "alone and not complete" tests/acceptance tests/chaos

test-again: $(STAMP)  ## Run what failed once more, one at a time, if it is at most three tests; then those of `test-alone`
	@test $$($(BIN)/python -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))') -le 3 || \
		{ echo "more than three tests failed: that is no accident" >&2; exit 1; }
	$(BIN)/pytest --last-failed --last-failed-no-failures none -m "not complete"
	$(MAKE) test-alone

test-quick: $(STAMP)  ## Run the unit tests, the contracts and one test of each mode of delivery: a minute
	$(BIN)/pytest -n $(or $(JOBS),2) tests/unit tests/contract $(SMOKE)

test-all: $(STAMP)  ## Run all tests, the long ones too: about an hour
	$(BIN)/pytest -n $(or $(JOBS),4) -m "not alone"
	OUTBOX_TEST_FAULT_ROUNDS=20 OUTBOX_TEST_QUEUE_MESSAGES=6000 $(BIN)/pytest -m alone

test-lowest: $(STAMP)  ## Run the quick tests against the lowest versions of dependencies that pyproject.toml allows
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct \
		--editable '.[harvester,sqlalchemy,django,django-tasks,completion,queue,spark,delta,iceberg]'
	$(BIN)/uv pip install --quiet --python .venv-lowest --group dev
	.venv-lowest/bin/pytest -n $(or $(JOBS),2) tests/unit tests/contract $(SMOKE)

test-django6:  ## Run the tests of Django on Django 6, with the newest Python on the PATH, or PYTHON6=/path/to/it
	@test -n "$(PYTHON6)" || { echo "Django 6 needs Python 3.12 or later, and the PATH has none; name one: make $@ PYTHON6=/path/to/python3" >&2; exit 1; }
	$(PYTHON6) -m venv --clear .venv-django6
	$(call pip_and_uv,.venv-django6/bin/python)
	.venv-django6/bin/uv pip install --quiet --python .venv-django6/bin/python --group dev 'django>=6,<7' \
		--editable '.[harvester,sqlalchemy,django,completion,queue,tracing]'
	.venv-django6/bin/pytest -n $(or $(JOBS),2) tests/integration/django tests/integration/queue/test_queue_django_tasks.py

python6:  # prints the Python of test-django6; nothing if there is none
	@echo $(PYTHON6)

costs-accept: $(STAMP)  ## Write what a record costs now (statements, WAL, calls) into tests/costs/baseline.toml
	OUTBOX_TEST_ACCEPT_COSTS=1 $(BIN)/pytest tests/costs/test_costs.py

test-chaos: $(STAMP)  ## Run the chaos tests alone, with every kind of fault at least once: some minutes
	$(BIN)/pytest tests/chaos

test-queues: $(STAMP)  ## The fault test of queues in full: 100,000 messages, consumers and trackers killed, some minutes
	OUTBOX_TEST_QUEUE_MESSAGES=$(or $(MESSAGES),100000) $(BIN)/pytest tests/acceptance/test_queue_faults.py

chaos: $(STAMP)  ## Faults at random for MINUTES=10 (MODE=exactly-once|at-least-once BROKERS=1|3 DECK=all FAULTS=n SEED=n), with a report
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10) --mode $(or $(MODE),exactly-once) \
		--brokers $(or $(BROKERS),1) --deck $(or $(DECK),all) $(if $(SEED),--seed $(SEED)) $(if $(HOSTILE),--hostile) \
		$(if $(LATE),--late-requests $(LATE)) $(if $(RECORDS),--least-records $(RECORDS)) \
		$(if $(FAULTS),--least-faults $(FAULTS)) $(if $(ILLNESS),--longest-illness $(ILLNESS))

chaos-effects: $(STAMP)  ## TASKS=10000 of Django and RECORDS=100000 consumed under FAULTS=90, each with its effect once (SEED=n), with a report
	$(BIN)/python -m tests.chaos.effects --tasks $(or $(TASKS),10000) --records $(or $(RECORDS),100000) \
		--faults $(or $(FAULTS),90) $(if $(SEED),--seed $(SEED))

simulate: $(STAMP)  ## Harvesters in a simulated world: HOURS=0.1 (MODE= FIRST=n), or one SEED=n with its trace; RULE= breaks one (MEDIAN=5)
	$(BIN)/python -m tests.simulation --hours $(or $(HOURS),0.1) $(if $(MODE),--mode $(MODE)) $(if $(SEED),--seed $(SEED)) \
		$(if $(FIRST),--first $(FIRST)) $(if $(RULE),--rule "$(RULE)") $(if $(MEDIAN),--median $(MEDIAN))

spark-faults: $(STAMP)  ## FAULTS=60 on a Spark cluster while RECORDS=1000000 pass relay, archive, projection, replay (BROKERS=3 SEED=n)
	$(BIN)/python -m tests.spark.faults.run --faults $(or $(FAULTS),60) --records $(or $(RECORDS),1000000) \
		--brokers $(or $(BROKERS),1) $(if $(SEED),--seed $(SEED))

explore: $(STAMP)  ## Orders of a small world, one by one: DEVIATIONS=2 unusual choices on a path (all: any), OPTIONS="--records 1"; RULE= breaks one
	$(BIN)/python -m tests.simulation.exhaustive --deviations $(or $(DEVIATIONS),2) $(OPTIONS) $(if $(RULE),--rule "$(RULE)")

screenshots: $(STAMP)  ## Take the pictures of the console in docs/images anew
	$(BIN)/python -m tests.console.screenshots

demo: $(STAMP)  ## Two applications, two harvesters, a killed leader: watch that nothing is lost
	$(BIN)/python -m example_project.demo

demo-pipeline: $(STAMP)  ## Client, API, database, Kafka, Spark (CLUSTER=1: two workers), database: exactly once through two kills
	$(BIN)/python -m example_project.demo_pipeline $(if $(CLUSTER),--cluster)

bench: $(STAMP)  ## Measure the harvester beside the raw limits of this machine
	$(BIN)/python -m benchmarks.throughput

bench-stash: $(STAMP)  ## Measure stashing by each adapter, with and without tracing and serializers (OTHER=/path/to/a/checkout)
	$(BIN)/python -m benchmarks.stash $(if $(OTHER),--other $(OTHER))

bench-failover: $(STAMP)  ## Measure how long nothing is published when the leader dies or is stopped
	$(BIN)/python -m benchmarks.failover

bench-latency: $(STAMP)  ## Measure the time from commit to consumer
	$(BIN)/python -m benchmarks.latency

bench-queue: $(STAMP)  ## Measure sending, receiving and acknowledging messages of a queue
	$(BIN)/python -m benchmarks.queue

bench-queue-budget: $(STAMP)  ## Measure the CPU time of a queue's message by thread, beside bare clients (OTHER=/path/to/a/checkout)
	$(BIN)/python -m benchmarks.queue_budget $(if $(OTHER),--other $(OTHER))

bench-tracker: $(STAMP)  ## Measure how soon a tracker is ready, with 10 million markers and with a normal history
	$(BIN)/python -m benchmarks.queue_tracker

bench-pipelines: $(STAMP)  ## Measure archive, project and audit on Spark beside a bare consumer
	$(BIN)/python -m benchmarks.spark_pipelines

bench-tables: $(STAMP)  ## Measure the archive into Delta and Iceberg beside the same rows in plain Parquet
	$(BIN)/python -m benchmarks.spark_tables

bench-relay: $(STAMP)  ## Measure the Spark sources and the relay beside raw reads of the same source
	$(BIN)/python -m benchmarks.spark_relay

bench-backlog: $(STAMP)  ## Measure throughput and memory over a backlog of 10 million records
	$(BIN)/python -m benchmarks.backlog

bench-idle: $(STAMP)  ## Measure what an idle leader costs
	$(BIN)/python -m benchmarks.idle

bench-notify: $(STAMP)  ## Measure what the trigger for NOTIFY costs writers
	$(BIN)/python -m benchmarks.notify

bench-snapshot: $(STAMP)  ## Measure throughput while an old snapshot stays open; draws a chart
	$(BIN)/python -m benchmarks.held_snapshot

bench-pressure: $(STAMP)  ## Measure MINUTES=30 each of a held snapshot, readers, overload and a burst at 2,000 records/s; draws charts
	$(BIN)/python -m benchmarks.pressure --minutes $(or $(MINUTES),30) $(OPTIONS)

bench-small-topic: $(STAMP)  ## Measure exactly once into a topic of 64 KiB a batch beside one of 1 MiB
	$(BIN)/python -m benchmarks.small_topic

bench-quota: $(STAMP)  ## Measure both deliveries under a client quota of the brokers, beside a bare producer (OTHER=/path/to/another checkout)
	$(BIN)/python -m benchmarks.quota $(if $(OTHER),--other $(OTHER)) $(OPTIONS)

bench-versions: $(STAMP)  ## Measure one delivery in turn with another checkout: OTHER=/path/to/it (MODE=exactly-once|at-least-once)
	$(BIN)/python -m benchmarks.versions $(OTHER) --delivery $(or $(MODE),exactly-once)

bench-holds: $(STAMP)  ## Measure what held records and paused topics cost the rest
	$(BIN)/python -m benchmarks.holds

bench-retention: $(STAMP)  ## Measure what history and archive cost a delivery
	$(BIN)/python -m benchmarks.retention

bench-console: $(STAMP)  ## Measure the answers of the console with 10 million pending records
	$(BIN)/python -m benchmarks.console

bench-all: bench bench-stash bench-latency bench-failover bench-backlog bench-idle bench-notify bench-snapshot bench-holds  ## All of the above, one after the other
bench-all: bench-queue bench-tracker bench-pipelines bench-tables bench-relay bench-small-topic bench-quota bench-retention bench-console

clean:  ## Remove what the targets above made (keeps downloaded broker parts)
	rm -rf $(VENV) $(DOCS) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
