SHELL := bash
.DELETE_ON_ERROR:
.PHONY: setup demo test check newest conformance part rows since real lint bench as-gpu features docs release

PYTHON ?= python3.11
READY := .venv/.ready
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# print a command as one would type it, then run it
define run
{ printf '\n$$ %s\n' "$(1)"; $(1); }
endef

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[adni,dev]"
	touch $@

# what it learns of this machine's speed stays with it too
demo: export LIGHTNING_HYBRID_CACHE := demo/lightning_hybrid
demo: $(READY)
	@$(call run,python -m datamodules synth demo/adni --subjects 330 --resolution 4)
	@$(call run,python -m models fit --config configs/demo.yaml)
	@run=$$(ls -td demo/run/version_* | head -1) && best=$$run/checkpoints/best.ckpt \
	&& $(call run,python -m models test --config configs/demo.yaml --ckpt_path $$best) \
	&& $(call run,python -m models explain --config configs/demo.yaml --ckpt_path $$best \
		--subjects 2 --truth demo/adni/truth/planted) \
	&& $(call run,python -m datamodules synth demo/elsewhere --subjects 24 --resolution 4 \
		--elsewhere --seed 1) \
	&& $(call run,python -m models test --ckpt_path $$best --cohort demo/elsewhere) \
	&& scan=$$(find demo/elsewhere/ADNI -name "*MT1*.nii.gz" | sort | head -1) \
	&& $(call run,python -m models predict --ckpt_path $$best --scans $$scan \
		--out $$run/new_scans) \
	&& $(call run,python -m models report $$run)

# each test with one thread for its sums; tests of one file one after the other
PYTEST := python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses
test check newest conformance part rows since real: export OMP_NUM_THREADS := 1

# (a hang that Python cannot interrupt, as it can for pytest's own timeout, ends its process)
# (three at once for two cores: processes that start and ranks that wait take a third of the time)
FAST := $(PYTEST) 3 -o faulthandler_timeout=700 -o faulthandler_exit_on_timeout=true
test: $(READY)
	$(FAST)

# what a change in one room can break, in one process: make check ROOM=driver
check: $(READY)
	@test -d lightning_hybrid/$(or $(ROOM),none) || { echo "make check ROOM=NAME: a folder of lightning_hybrid/, such as driver"; exit 1; }
	$(PYTEST) 2 $(wildcard tests/$(ROOM)) tests/test_architecture.py -m "not conformance and not as_gpu and not real and not distributed"

# what users train with, in an environment of its own; PART=TEXT: one of twelve parts
REAL = $(PYTEST) 2 --dist loadgroup -m real $(if $(PART),--part "$(PART)") tests/real tests/state tests/conformance
real: export PATH := $(CURDIR)/.venv-real/bin:$(PATH)
real: .venv-real/.ready
	$(REAL)

.venv-real/.ready: pyproject.toml constraints.txt
	test -x .venv-real/bin/python || $(PYTHON) -m venv .venv-real
	.venv-real/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,real]"
	touch $@

# `make test` on the newest torch and Lightning that pip finds: first the wheel alone is installed, as by
# a user, and trains with two stages. Then `make real`, on the newest of everything.
NEWEST := $(CURDIR)/.venv-newest
newest: export PATH := $(NEWEST)/bin:$(PATH)
newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	python -m pip wheel --quiet --no-deps --wheel-dir $(NEWEST)/wheel .
	python -m pip install --quiet $(NEWEST)/wheel/*.whl
	cd $(NEWEST) && python $(CURDIR)/tests/wheel/first_script.py 2
	python -m pip install --quiet --upgrade "$$(ls $(NEWEST)/wheel/*.whl)[adni,dev]"
	python -m pip list | grep -iE "torch|lightning|^numpy"
	$(FAST)
	python -m pip install --quiet "$$(ls $(NEWEST)/wheel/*.whl)[real,vision]"
	python -m pip list | grep -iE "torch|transformers|peft|diffusers|timm|segmentation|lightly"
	$(REAL)

conformance: $(READY)
	$(PYTEST) 2 -m "conformance and not real"

# another part of the slow tier with each commit
part: $(READY)
	$(PYTEST) 2 -m "conformance and not real" --part "$$(git rev-parse HEAD)" tests/conformance tests/wheel tests/torch_names tests/graph tests/capture tests/driver tests/datamodules tests/allocation tests/planning tests/profiling tests/asking tests/strategy

# all rows under two stages, in which most of what can break a row breaks it
ROWS := $(PYTEST) 1 -m "conformance and not real" tests/conformance/test_conformance.py::TestTwoStages
rows: $(READY)
	$(ROWS)

# finds the commit since which a row fails: make since ROW=NAME GOOD=COMMIT, in which it worked
since: $(READY)
	@test -n "$(ROW)" -a -n "$(GOOD)" || { echo "make since ROW=NAME GOOD=COMMIT"; exit 1; }
	@test -z "$$(git status --porcelain -uno)" || { echo "git status shows changes: commit them first"; exit 1; }
	git bisect start HEAD $(GOOD)
	git bisect run $(ROWS) -k "$(ROW)"; git bisect reset

# emulated GPUs, which the other tests must not see
as-gpu: export OMP_NUM_THREADS := 1
as-gpu: $(READY)
	$(PYTEST) 2 -m as_gpu tests/as_gpu

lint: $(READY)
	ruff check .
	ruff format --check .
	mypy

# the page of what works, written from the rows of the suite
features: $(READY)
	python tests/conformance/features.py

# the site, in site/; a broken link or anchor ends it
docs: .venv-docs/.ready
	.venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

bench: $(READY)
	python -m benchmarks

# sdist and wheel of the version in pyproject.toml, checked and installed as by a user; then the files of
# changelog/ are collected under it in CHANGELOG.md, which is committed and tagged
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
release: $(READY) lint
	@test -z "$$(git status --porcelain)" || { echo "git status shows changes: commit them first"; exit 1; }
	@python changelog/release.py --check $(VERSION)
	rm -rf dist
	python -m hatchling build
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/python -m pip install --quiet twine dist/*.whl
	.venv-release/bin/twine check --strict dist/*
	cd .venv-release && bin/python $(CURDIR)/tests/wheel/first_script.py 2
	python changelog/release.py $(VERSION)
	git add --all changelog CHANGELOG.md
	git diff --cached --quiet || git commit --message "Release $(VERSION)"
	git tag "v$(VERSION)"
