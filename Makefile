# make test   everything that can be tested: Rust, real runtimes, NRI's own code
# make lint   formatting, clippy, go vet, and licences where cargo-deny is installed
# make man    the manual pages in docs/man, from the programs themselves
# make chaos  ten minutes of faults on a real containerd (CHAOS_SECONDS, CHAOS_SEED, see
#             tests/harness/tests/chaos/main.rs); a short run of it is part of make test
# make bench  what a validation costs, side by side with a Go plugin; on a quiet machine
# make demo   the whole story with a simulated runtime, in a few seconds
#
# From a fresh clone, as root, on Debian or Ubuntu with cargo and go installed.
# Results go to target/ only.

CARGO ?= cargo
GO    ?= go

# What the real-runtime tests start besides our own builds. Installed only when
# missing; elsewhere than on Debian they have to be there already.
packages := runc busybox-static iproute2 strace util-linux systemd

.PHONY: demo test chaos lint deps go fmt man

demo:
	$(CARGO) build --locked --bins
	target/debug/nri-lease demo

test: deps go
	$(CARGO) build --locked --workspace --bins
	$(CARGO) test --locked --workspace

chaos: deps go
	$(CARGO) build --locked --workspace --bins
	CHAOS_SECONDS=$${CHAOS_SECONDS:-600} $(CARGO) test --locked -p nri-lease-harness --test chaos

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@unformatted=$$(gofmt -l tests/go); \
		if [ -n "$$unformatted" ]; then echo "gofmt: $$unformatted"; exit 1; fi
	$(MAKE) --no-print-directory -C tests/go vet
	@if $(CARGO) deny --version >/dev/null 2>&1; then \
		$(CARGO) deny check licenses bans sources; \
	else echo "cargo-deny is not installed: licences, bans and sources not checked"; fi

man:
	$(CARGO) build --locked --bins
	rm -rf docs/man && mkdir -p docs/man
	target/debug/nri-lease man --dir docs/man

fmt:
	$(CARGO) fmt --all
	gofmt -w tests/go

go:
	$(MAKE) --no-print-directory -C tests/go all

deps:
	@missing=; for p in $(packages); do \
		dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "not installed, so some tests are skipped:$$missing"; exit 0; \
	fi; \
	echo "installing:$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get -qq update && apt-get -qq install -y --no-install-recommends $$missing

# What a validation costs, beside the same check as a Go plugin. On a quiet machine.
bench: go
	$(CARGO) build --locked --release --bins
	$(CARGO) build --locked -p nri-lease-harness --example hook_latency
	NRI_LEASE_BIN=$(CURDIR)/target/release target/debug/examples/hook_latency
