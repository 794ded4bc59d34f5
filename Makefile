# Baton: build, set-up, tests, local cluster. `make help` lists the targets.
#   make                 binaries in build/bin, plugins in build/lib
#   make check           set-up, build, all tests; last line "N passed, M failed"
#   make demo            set-up, build, a whole cluster on this machine answers a prompt
#   make up, down        a cluster on this machine that stays (deploy/local/baton-local has the options)
#   make check-upgrade  a cluster of an earlier release is upgraded under load (PREVIOUS=tag; by default the last one)
#   make chaos           a cluster under load and faults (MINUTES=60, SEED= to repeat a run, CHAOS=options; docs/FAULTS.md)
#   make fuzz            all fuzz targets (SECONDS=300 in all, FUZZ=options and targets; tests/fuzz/README.md); needs clang
#   make tsan            the daemons under the thread sanitizer and a mixed load (SECONDS=60 for each engine)
#   make bench           all benchmarks, FULL=1 with all repetitions
#   make check-ui            the tests of the web page, which need Chromium; screenshots: docs/images anew
#   make check-gpu, bench-gpu   checks and benchmarks of the cuda engine, on a GPU
#   make bundle          one archive to unpack and run elsewhere (GPU=1: for machines with a GPU; TESTS=1: also
#                        with the programs of check-gpu, to run there by tests/gpu/run)
#   make deb             packages for Debian in build/debian (deploy/debian/build.sh has the options)
#   make check-deb       installs, serves with, upgrades and purges them in a fresh Debian with systemd; as root
#   make install         PREFIX (/usr/local), SYSCONFDIR (/etc), DESTDIR; uninstall removes it
#   make lint, docs      checks of the sources; the generated documents anew
#   make SANITIZE=address,undefined …   an instrumented build in build-san-address-undefined
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := all

PREFIX  ?= /usr/local
DESTDIR ?=
SYSCONFDIR ?= /etc
SANITIZE ?=
comma := ,
B := build$(if $(SANITIZE),-san-$(subst $(comma),-,$(SANITIZE)))
CC ?= gcc
ifeq ($(origin CC),default)
CC := gcc
endif
PYTHON ?= python3
CUDA ?= /usr/local/cuda
NVCC := $(wildcard $(CUDA)/bin/nvcc)
RELEASE := $(shell cat deploy/VERSION)
# The commit: of this checkout, not of a repository around it; of an archive that git made; or given as COMMIT=.
COMMIT  ?= $(shell if [ -e .git ]; then git describe --exclude='*' --always --abbrev=12 --dirty; else grep -v Format deploy/COMMIT; fi 2>/dev/null)
VERSION := $(RELEASE) ($(or $(COMMIT),unknown))

WARN := -Wall -Wextra -Wshadow -Wmissing-prototypes -Wstrict-prototypes -Wswitch-enum -Werror=implicit-function-declaration
OPT  ?= -O2
# A report ends the process: a process that went on could pass a test.
SAN  := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)
CPPFLAGS += -I. -I$(B)/gen -D_GNU_SOURCE
CFLAGS   += -std=gnu11 -g $(OPT) -fPIC -fno-semantic-interposition $(WARN) $(SAN)
LDFLAGS  += $(SAN) -Wl,--as-needed -rdynamic
# In a bundle the libraries lie in lib/baton beside bin. DT_RPATH, not DT_RUNPATH: it also serves what they need.
RPATH    := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../lib/baton'
LDLIBS   := -lgrpc -lgpr -lprotobuf-c -lucp -lucs -ljansson -lyaml -lpcre2-8 -lssl -lcrypto -lrocksdb -luring -lpthread -ldl -lm

# ---- sources, by folder: a new file needs no line here ----
PROTOS   := $(wildcard proto/*.proto)
GEN_C    := $(patsubst proto/%.proto,$(B)/gen/%.pb-c.c,$(PROTOS))
GEN_H    := $(GEN_C:.c=.h)
COMMON_C := $(filter-out common/engine/%,$(wildcard common/*/*.c)) $(wildcard common/engine/*.c common/policy/*/*.c common/token/*/*.c)
CPU_C    := $(wildcard common/engine/cpu/*.c)
NULL_C   := $(wildcard common/engine/null/*.c)
CUDA_DIRS := $(wildcard common/engine/cuda/ common/engine/cuda/*/)
CUDA_SRC := $(wildcard $(addsuffix *.cu,$(CUDA_DIRS)) $(addsuffix *.c,$(CUDA_DIRS)))
mains     = $(filter-out %/main.c,$(1))
KVSTORE_C   := $(call mains,$(wildcard kvstore/*.c kvstore/*/*.c))
CONDUCTOR_C := $(call mains,$(wildcard conductor/*.c conductor/front/*.c conductor/reply/*.c conductor/request/*.c conductor/view/*.c))
CTL_C       := $(wildcard conductor/ctl/*.c)
SIM_C       := $(call mains,$(wildcard conductor/sim/*.c))
PREFILL_C   := $(call mains,$(wildcard prefill/*.c))
DECODE_C    := $(call mains,$(wildcard decode/*.c))
UNIT_C      := $(wildcard tests/unit/test_*.c) $(wildcard tests/golden/test_*.c)
TOOL_C      := $(filter-out %/fail_nth.c %/bench_grammar.c,$(wildcard tests/tools/*.c))

obj = $(patsubst %.c,$(B)/obj/%.o,$(filter %.c,$(1)))
GEN_O := $(patsubst $(B)/gen/%.c,$(B)/obj/gen/%.o,$(GEN_C))
LIBS  := $(B)/libsim.a $(B)/libconductor.a $(B)/libkvstore.a $(B)/libprefill.a $(B)/libdecode.a $(B)/libbaton.a
BENCH_TOOL := $(B)/bin/baton-bench $(B)/bin/baton-bench-grammar
BINS  := $(addprefix $(B)/bin/,baton-conductor baton-kvstore baton-prefill baton-decode batonctl baton-sim)
PLUGINS := $(B)/lib/baton-engine-cpu.so $(B)/lib/baton-engine-null.so
# Sanitizers do not look into device code.
ifneq ($(and $(NVCC),$(CUDA_SRC),$(if $(SANITIZE),,1)),)
PLUGINS += $(B)/lib/baton-engine-cuda.so
endif
GPU_BINS := $(patsubst %.c,$(B)/%,$(wildcard tests/gpu/check_*.c tests/gpu/bench_*.c))
UNIT_BINS := $(patsubst tests/%.c,$(B)/tests/%,$(UNIT_C))
TOOL_BINS := $(patsubst tests/%.c,$(B)/tests/%,$(TOOL_C)) $(B)/tests/tools/fail_nth.so

.PHONY: all tests setup setup-tests check check-gpu bench-gpu gpu-programs demo up down bench lint install install-files install-system uninstall bundle clean help docs
all: $(BINS) $(BENCH_TOOL) $(PLUGINS) $(B)/version
ifeq ($(NVCC),)
	@echo "note: no nvcc in $(CUDA)/bin; CUDA sources were not compiled"
endif
tests: all $(UNIT_BINS) $(TOOL_BINS)

# Looked at before anything is built, once in a build directory: a missing package is named with its remedy.
$(B)/packages: deploy/local/setup.sh
	@deploy/local/setup.sh --check
	@mkdir -p $(B) && touch $@
ifneq ($(filter all tests install $(B)/%,$(or $(MAKECMDGOALS),all)),)
include $(B)/packages
endif
$(B)/gen/%.pb-c.c $(B)/gen/%.pb-c.h: proto/%.proto
	@mkdir -p $(B)/gen
	protoc-c --proto_path=proto --c_out=$(B)/gen $<
$(B)/gen/normal_form.def: common/token/normal_form_gen.py
	@mkdir -p $(@D)
	$(PYTHON) $< >$@.new && mv $@.new $@
$(B)/obj/common/token/normal_form.o: $(B)/gen/normal_form.def
$(B)/gen/categories.def: common/grammar/categories_gen.py
	@mkdir -p $(@D)
	$(PYTHON) $< >$@.new && mv $@.new $@
$(B)/obj/common/grammar/chars.o: $(B)/gen/categories.def common/grammar/scripts.def
UI_FILES := $(wildcard conductor/ui/*.html conductor/ui/*.css conductor/ui/*.js conductor/ui/*.svg)
$(B)/gen/ui_files.def: conductor/ui/embed.py $(UI_FILES)
	@mkdir -p $(@D)
	$(PYTHON) $< $(UI_FILES) >$@.new && mv $@.new $@
$(B)/obj/conductor/front/front_pages.o: $(B)/gen/ui_files.def
$(B)/obj/gen/%.o: $(B)/gen/%.c $(GEN_H)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(filter-out $(WARN),$(CFLAGS)) -c -o $@ $<
$(B)/obj/%.o: %.c | $(GEN_H)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(CFLAGS_$(subst /,_,$(dir $<))) -MMD -MP -c -o $@ $<
# A build that goes on after a commit must not mix versions.
CPPFLAGS_version := -DBT_RELEASE='"$(RELEASE)"' -DBT_VERSION='"$(VERSION)"'
$(B)/version: FORCE
	@mkdir -p $(B)
	@echo '$(VERSION)' | cmp -s - $@ || echo '$(VERSION)' > $@
.PHONY: FORCE
$(B)/obj/common/base/version.o: common/base/version.c $(B)/version
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CPPFLAGS_version) $(CFLAGS) -MMD -MP -c -o $@ $<
# Kernels of the CPU engine are compiled for this family of processors and chosen at run time.
-include $(wildcard common/engine/cpu/flags.mk)

define archive
	@rm -f $@
	ar rcs $@ $^
endef
$(B)/libbaton.a: $(call obj,$(COMMON_C)) $(GEN_O)
	$(archive)
$(B)/libconductor.a: $(call obj,$(CONDUCTOR_C))
	$(archive)
$(B)/libsim.a: $(call obj,$(SIM_C))
	$(archive)
$(B)/libkvstore.a: $(call obj,$(KVSTORE_C))
	$(archive)
$(B)/libprefill.a: $(call obj,$(PREFILL_C))
	$(archive)
$(B)/libdecode.a: $(call obj,$(DECODE_C))
	$(archive)

link = @mkdir -p $(@D)
LINK = $(CC) $(LDFLAGS) $(RPATH) -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDLIBS)
$(B)/bin/baton-conductor: $(B)/obj/conductor/main.o $(B)/libconductor.a $(B)/libbaton.a
	$(link)
	$(LINK)
$(B)/bin/baton-kvstore: $(B)/obj/kvstore/main.o $(B)/libkvstore.a $(B)/libbaton.a
	$(link)
	$(LINK)
$(B)/bin/baton-prefill: $(B)/obj/prefill/main.o $(B)/libprefill.a $(B)/libdecode.a $(B)/libbaton.a
	$(link)
	$(LINK)
$(B)/bin/baton-decode: $(B)/obj/decode/main.o $(B)/libprefill.a $(B)/libdecode.a $(B)/libbaton.a
	$(link)
	$(LINK)
$(B)/bin/batonctl: $(call obj,$(CTL_C)) $(B)/libbaton.a
	$(link)
	$(LINK)
$(B)/bin/baton-sim: $(B)/obj/conductor/sim/main.o $(B)/libsim.a $(B)/libconductor.a $(B)/libbaton.a
	$(link)
	$(LINK)
# A link, so that the tool finds its modules in the source tree.
$(B)/bin/baton-bench: tests/bench/baton-bench
	$(link)
	@ln -sf ../../$< $@
# Installed beside the modules of baton-bench, which start them.
$(B)/bin/baton-bench-grammar $(B)/tests/tools/bench_engine: RPATH := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/..'
$(B)/bin/baton-bench-grammar: $(B)/obj/tests/tools/bench_grammar.o $(B)/libbaton.a
	$(link)
	$(LINK)
$(B)/lib/baton-engine-cpu.so: $(call obj,$(CPU_C)) $(B)/libbaton.a
	$(link)
	$(CC) $(LDFLAGS) -shared -o $@ $(filter %.o,$^) $(B)/libbaton.a -ldnnl -lgomp $(LDLIBS)
$(B)/lib/baton-engine-null.so: $(call obj,$(NULL_C)) $(B)/libbaton.a
	$(link)
	$(CC) $(LDFLAGS) -shared -o $@ $(filter %.o,$^) $(B)/libbaton.a $(LDLIBS)
# Hopper's own target has its matrix and copy instructions; all that is not theirs alone is also compiled for compute
# capability 8.0, and as PTX for what is newer. No C++ runtime is used.
HOPPER := -gencode=arch=compute_90a,code=sm_90a
PORTABLE := -gencode=arch=compute_80,code=[sm_80,compute_80]
NVCCARCH = $(if $(filter %_mma,$(*F)),,$(HOPPER)) $(if $(filter %_tma %_wgmma skinny% wide%,$(*F)),,$(PORTABLE))
NVCCFLAGS := -ccbin $(CC) -O3 -std=c++17 -I. \
             -Xcompiler -fPIC,-fno-threadsafe-statics,-fno-exceptions,-Wall
CUDA_O := $(patsubst %.c,$(B)/obj/%.o,$(patsubst %.cu,$(B)/obj/%.cu.o,$(CUDA_SRC)))
# Ranges for Nsight Systems (ranges.h); NVTX=0 leaves them out.
NVTX ?= 1
$(foreach d,$(CUDA_DIRS),$(eval CFLAGS_$(subst /,_,$d) := -isystem $(CUDA)/include $(if $(filter-out 0,$(NVTX)),-DBT_NVTX)))
CFLAGS_tests_gpu_ := -isystem $(CUDA)/include
$(B)/obj/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(NVCCARCH) -MMD -MP -c -o $@ $<
$(B)/libcuda-kernels.a: $(filter %/attention/attention.o %/mla.o %/gemm.o %/experts.o %/device.o %/tensor_map.o %.cu.o,$(CUDA_O))
	$(archive)
$(B)/lib/baton-engine-cuda.so: $(CUDA_O) $(B)/libbaton.a
	$(link)
	$(CC) $(LDFLAGS) -shared -o $@ $(filter %.o,$^) $(B)/libbaton.a -L$(CUDA)/lib64 \
		-Wl,-rpath,$(CUDA)/lib64 -lcublasLt -lcudart_static -lrt $(LDLIBS)
$(B)/tests/gpu/%_engine: $(B)/obj/tests/gpu/%_engine.o $(LIBS) $(B)/lib/baton-engine-cuda.so
	$(link)
	$(CC) $(LDFLAGS) $(RPATH) -o $@ $(filter %.o,$^) -Wl,--start-group $(LIBS) -Wl,--end-group \
		$(LDLIBS) -lcmocka
$(B)/tests/gpu/%: $(B)/obj/tests/gpu/%.o $(B)/obj/tests/gpu/ref.cu.o $(B)/libcuda-kernels.a $(B)/libbaton.a
	$(link)
	$(CC) $(LDFLAGS) -o $@ $^ -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lcublasLt -lcudart_static -lrt $(LDLIBS)
# Loaded into daemons that may be built without a sanitizer only.
$(B)/tests/tools/fail_nth.so: tests/tools/fail_nth.c
	$(link)
	$(CC) -O2 $(WARN) -Wno-missing-prototypes -D_GNU_SOURCE -shared -fPIC -o $@ $< -ldl
$(B)/tests/%: $(B)/obj/tests/%.o $(LIBS)
	$(link)
	$(LINK) -lcmocka
# The cuda engine's host code over a device in plain C: needs neither a GPU nor CUDA.
CUDA_HOST_O := $(patsubst %,$(B)/obj/cuda_host/%.o,cuda weights weights_fp8 copy slab step/step step/inputs step/attention step/latent step/mlp step/products step/choose step/invariant step/dola step/contrast sample/draw sample/draw_check) $(call obj,$(wildcard tests/cuda_host/*.c))
CFLAGS_tests_cuda_host_ := -Itests/cuda_host
$(B)/obj/cuda_host/%.o: common/engine/cuda/%.c | $(GEN_H)
	@mkdir -p $(@D)
	$(CC) -Itests/cuda_host -DBT_CU_SLAB_PIECE=4096 -DBT_CU_LATENT_BYTES=600000 -DBT_CU_CLASS_BYTES=2000 $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<
$(patsubst %,$(B)/tests/unit/test_cuda_%,engine fp8 fp8_files golden model search): $(CUDA_HOST_O)
-include $(CUDA_HOST_O:.o=.d)
# Fuzz targets: tests/fuzz/run builds them, with clang, in a build directory of their own. rig.c stands in for the clock,
# the kernel's random numbers and the log; FUZZ_WRAP_TARGET names what else a target replaces.
FUZZ_C := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BINS := $(patsubst tests/fuzz/fuzz_%.c,$(B)/fuzz/%,$(FUZZ_C))
FUZZ_WRAP := clock_gettime bt_random bt_log
FUZZ_WRAP_ssd := pthread_create pthread_join pthread_cond_wait pthread_cond_timedwait
FUZZ_WRAP_peer := bt_wx_start_thread bt_wx_over bt_loop_poll bt_loop_short_slices pthread_join bt_wire_cards bt_wire_link_up
FUZZ_RIG := $(call obj,$(filter-out $(FUZZ_C),$(wildcard tests/fuzz/*.c)))
FUZZ_OPT := -O1 -mf16c -D_Float16=__fp16 -fno-omit-frame-pointer
FUZZ_SAN := -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
# The other end of what is tested does not guide the search.
CFLAGS_tests_fuzz_ := $(if $(findstring fuzzer,$(SAN)),-fno-sanitize-coverage=trace-cmp$(comma)trace-div$(comma)trace-gep)
.PHONY: fuzz fuzz-targets fuzz-flags
fuzz-targets: $(FUZZ_BINS)
fuzz-flags:
	@echo '$(FUZZ_OPT)'; echo '$(FUZZ_SAN)'
$(B)/libfuzz.a: $(FUZZ_RIG)
	$(archive)
$(B)/fuzz/%: $(B)/obj/tests/fuzz/fuzz_%.o $(B)/libfuzz.a $(LIBS)
	$(link)
	$(CC) $(LDFLAGS) -fsanitize=fuzzer $(patsubst %,-Wl$(comma)--wrap=%,$(FUZZ_WRAP) $(FUZZ_WRAP_$*)) -o $@ $< \
		-Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDLIBS)
.SECONDARY:

-include $(patsubst %.o,%.d,$(FUZZ_RIG) $(call obj,$(FUZZ_C)))
-include $(patsubst %.o,%.d,$(if $(NVCC),$(CUDA_O) $(B)/obj/tests/gpu/ref.cu.o $(GPU_BINS:$(B)/%=$(B)/obj/%.o)) $(call obj,$(COMMON_C) $(CPU_C) $(NULL_C) $(KVSTORE_C) $(CONDUCTOR_C) $(CTL_C) $(SIM_C) $(PREFILL_C) $(DECODE_C) $(UNIT_C) $(TOOL_C)) $(B)/obj/conductor/main.d $(B)/obj/tests/tools/bench_grammar.d $(B)/obj/conductor/sim/main.d $(B)/obj/kvstore/main.d $(B)/obj/prefill/main.d $(B)/obj/decode/main.d)

setup-tests:
	@deploy/local/setup.sh --tests
setup:
	@deploy/local/setup.sh
check: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) tests SANITIZE=$(SANITIZE)
	@BUILD=$(B) tests/run
.PHONY: check-ui screenshots
check-ui: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@BUILD=$(B) tests/run cluster/test_ui
screenshots: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@BUILD=$(B) tests/tools/screenshots.py docs/images
MINUTES ?= 60
.PHONY: chaos tsan check-upgrade
chaos: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) all $(B)/tests/tools/net_switch SANITIZE=$(SANITIZE)
	@BUILD=$(B) tests/chaos/chaos.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(CHAOS)
check-upgrade: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@BUILD=$(B) tests/check-upgrade $(PREVIOUS)
fuzz: setup-tests
	@tests/fuzz/run --seconds $(or $(SECONDS),300) $(FUZZ)
# Load under the thread sanitizer, in its own build directory.
tsan: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) all SANITIZE=thread
	@BUILD=build-san-thread tests/cluster/mixed_load.py $(or $(SECONDS),60)
ifeq ($(NVCC),)
check-gpu bench-gpu gpu-programs:
	@echo "$@: needs nvcc in $(CUDA)/bin and a Hopper GPU; set CUDA=<toolkit>"; exit 1
else
gpu-programs: $(GPU_BINS) $(B)/tests/golden/test_engine_golden $(B)/tests/golden/test_engine_exact $(B)/tests/golden/test_engine_search
check-gpu: gpu-programs
	@tests/gpu/run check $(B)
bench-gpu: gpu-programs
	@tests/gpu/run bench $(B)
endif
demo: setup
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@deploy/local/demo.sh
up: setup
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@deploy/local/baton-local up
down:
	@deploy/local/baton-local down
bench: setup-tests
	@$(MAKE) --no-print-directory -j$$(nproc) tests
	@tests/bench/run $(if $(FULL),--full)
lint:
	@tests/lint/run
docs: all
	@deploy/local/gen-config-doc.sh > docs/CONFIG.md
	@deploy/local/gen-api-doc.sh > docs/API.md
	@deploy/local/gen-models-doc.sh > docs/MODELS.md
	@deploy/local/gen-metrics-doc.sh > docs/METRICS.md
	@$(PYTHON) -B deploy/grafana/dashboards.py
install: all install-files install-system
# Also of a bundle, which is an installation under PREFIX= with its libraries beside it.
install-files:
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/baton $(addprefix $(DESTDIR)$(PREFIX)/share/,doc/baton baton/models)
	install -d $(DESTDIR)$(PREFIX)/lib/baton/bench
	install -m 755 $(BINS) deploy/local/baton-local deploy/local/baton-certs tests/bench/baton-bench $(DESTDIR)$(PREFIX)/bin
	install -m 644 tests/bench/load.py tests/bench/traces.py tests/bench/svg.py tests/bench/kv.py tests/bench/grammar.py tests/bench/vocab.py $(DESTDIR)$(PREFIX)/lib/baton/bench
	install -m 755 $(B)/bin/baton-bench-grammar $(DESTDIR)$(PREFIX)/lib/baton/bench
	if [ -x $(B)/tests/tools/bench_engine ]; then install -m 755 $(B)/tests/tools/bench_engine $(DESTDIR)$(PREFIX)/lib/baton/bench/baton-bench-engine; fi
	install -m 644 $(B)/version $(DESTDIR)$(PREFIX)/lib/baton/version
	install -m 755 $(PLUGINS) $(DESTDIR)$(PREFIX)/lib/baton
	cp -R deploy/models/* $(DESTDIR)$(PREFIX)/share/baton/models
	cp -R deploy/systemd deploy/config deploy/prometheus deploy/grafana $(DESTDIR)$(PREFIX)/share/baton
	install -m 644 README.md LICENSE docs/*.md $(DESTDIR)$(PREFIX)/share/doc/baton
	cp -R docs/plots docs/measurements docs/images $(DESTDIR)$(PREFIX)/share/doc/baton
# Units, system user and /etc/baton/*.example; nothing is started or enabled.
install-system:
	PREFIX=$(PREFIX) CONF=$(SYSCONFDIR)/baton deploy/systemd/install.sh $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(SYSCONFDIR)/baton
# All of it but configurations that somebody has made.
uninstall:
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,$(notdir $(BINS)) baton-local baton-certs baton-bench)
	rm -rf $(addprefix $(DESTDIR)$(PREFIX)/,lib/baton share/baton share/doc/baton)
	rm -rf $(addprefix $(DESTDIR)$(PREFIX)/lib/systemd/system/,$(notdir $(wildcard deploy/systemd/*.service deploy/systemd/*.target deploy/systemd/*.d)))
	rm -f $(DESTDIR)$(PREFIX)/lib/sysusers.d/baton.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/baton.conf
	rm -f $(patsubst deploy/config/%,$(DESTDIR)$(SYSCONFDIR)/baton/%.example,$(wildcard deploy/config/*.yaml))
	rmdir $(DESTDIR)$(SYSCONFDIR)/baton 2>/dev/null || true
# One archive that runs where none of the packages is; GPU=1: without oneDNN and the cpu engine. TESTS=1: with the programs of check-gpu.
bundle:
	@deploy/local/setup.sh --bundle
	@$(MAKE) --no-print-directory -j$$(nproc) all $(if $(TESTS),gpu-programs)
	@deploy/bundle/make-bundle.sh $(B) $(RELEASE) $(if $(GPU),gpu) $(if $(TESTS),tests)
.PHONY: deb check-deb
deb:
	@deploy/debian/build.sh $(RELEASE) $(if $(NVCC),cuda)
check-deb:
	@tests/check-deb
clean:
	rm -rf build build-san-*
help:
	@sed -n '2,/^[^#]/s/^# *//p' Makefile
