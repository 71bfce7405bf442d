# The lanes of pgmill. They need Go, and find or start a PostgreSQL by themselves (internal/pgtest): $PGMILL_TEST_DSN, local
# server binaries, Docker, or apt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-full chaos soak bench lint clean build withpg

# Only where there is Docker and no obvious server is the withpg used that can start one in Docker: it needs more modules.
WITHPG_MODULE := $(shell if { [ -S /var/run/docker.sock ] || [ -n "$${DOCKER_HOST-}" ]; } && \
	! { [ -n "$${PGMILL_TEST_DSN-}" ] || command -v postgres || ls /usr/lib/postgresql/*/bin/postgres; } >/dev/null 2>&1; \
	then echo tests/cmd; else echo internal/pgtest/cmd; fi)
WITHPG := .build/withpg -install --

help: ## list the lanes
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1: \2/p' $(MAKEFILE_LIST)

demo: withpg ## run examples/quickstart
	$(WITHPG) go run ./examples/quickstart

# Needs no C compiler. Under -short tests are smaller; none is left out.
test: export CGO_ENABLED := 0
test: build ## run every test of every module, each in its short form
	$(WITHPG) tools/test short

test-full: build ## run every test in full with -race, the stress variant and pgx's other exec modes (long; needs a C compiler)
	$(WITHPG) tools/test full

# Of each outage. The storm of kills lasts three times as long, beside the outages.
OUTAGE ?= 2m
chaos: export PGMILL_CHAOS := $(OUTAGE)
chaos: export CGO_ENABLED := 0
chaos: build ## five outages of the server of OUTAGE (2m) each under load, and processes and sessions killed and frozen
	$(WITHPG) tools/test chaos

SOAK ?= 30m
soak: export PGMILL_SOAK := $(SOAK)
soak: export CGO_ENABLED := 0
soak: build ## one process at work for SOAK (30m): goroutines, memory and connections stay flat
	$(WITHPG) tools/test soak

bench: withpg ## run the benchmarks of every module
	$(WITHPG) tools/modules go test -run '^$$' -bench . -benchmem ./...

lint: ## check the format, go vet, staticcheck and go.mod files of every module
	CGO_ENABLED=0 go -C tools build -o ../.build/ tool
	files=$$(.build/gofumpt -l .); if [ -n "$$files" ]; then echo "not gofumpt's format:"; echo "$$files"; exit 1; fi
	tools/modules go vet -tags stress ./...
	tools/modules $(CURDIR)/.build/staticcheck -tags stress ./...
	tools/modules go mod tidy -diff

clean: ## remove what the lanes leave
	rm -rf .build .promises.jsonl

build: withpg
	CGO_ENABLED=0 go -C tools build -o ../.build/ gotest.tools/gotestsum
	CGO_ENABLED=0 go build -o .build/ ./internal/promise/cmd/promises
	CGO_ENABLED=0 go -C tests build -o ../.build/ ./cmd/leaftests

withpg:
	CGO_ENABLED=0 go -C $(WITHPG_MODULE)/withpg build -o $(CURDIR)/.build/ .
