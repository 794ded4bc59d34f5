#!/bin/bash
# make bundle: one xz archive with everything but libc's family, to unpack and run on a machine that has none of
# the packages. Usage: make-bundle.sh BUILD VERSION [gpu] [tests]; BUILD is a finished build, the archive goes there.
#   README.md       what to do with it
#   bin/            daemons, batonctl, baton-local, baton-certs, baton-bench
#   lib/baton/      engine plugins, etcd, shared libraries, ucx/ (UCX's modules: libucs looks beside itself)
#   share/baton/    demo model; share/doc/baton/: documents, licences of what is packed
#   tests/          with `tests`: the checks and benchmarks of the cuda engine (tests/gpu/run)
# The executables find their libraries by an RPATH relative to themselves, so the folder may lie anywhere.
# BUNDLE_XZ_PRESET (default 6) trades the archive's size for time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
build=$1 version=$2 gpu='' tests=''
for option in "${@:3}"; do
    case $option in
    gpu) gpu=gpu ;;
    tests) tests=tests ;;
    *) echo "make-bundle.sh: no option $option" >&2; exit 2 ;;
    esac
done
limit=$((40 << 20))

die() { printf 'bundle: %s\n' "$*" >&2; exit 1; }
say() { printf 'bundle: %s\n' "$*" >&2; }
for tool in xz strip ldd python3; do
    command -v $tool >/dev/null || die "there is no $tool; install xz-utils, binutils and python3"
done
[ -n "$(ls "$build"/lib/*.so 2>/dev/null)" ] || die "$build is not built; run make first"
etcd=${BATON_ETCD:-build/third/etcd/usr/bin/etcd}
[ -x "$etcd" ] || etcd=$(command -v etcd) || die "there is no etcd; run make setup, or name one with BATON_ETCD"

name=baton-$version-$(uname -m)${gpu:+-gpu}${tests:+-tests}
stage=$build/bundle/$name
rm -rf "$build/bundle"
mkdir -p "$stage"
make --no-print-directory -s install-files B="$build" DESTDIR="$(cd "$stage" && pwd)" PREFIX=
lib=$stage/lib/baton
[ -z "$gpu" ] || rm -f "$lib/baton-engine-cpu.so"
install -m 755 "$etcd" "$lib/etcd"
programs=()
if [ -n "$tests" ]; then
    mkdir -p "$stage/tests/gpu" "$stage/tests/golden"
    cp -r "$build"/tests/gpu/{check,bench}_* tests/gpu/run tests/gpu/shapes "$stage/tests/gpu/"
    cp "$build"/tests/golden/test_engine_{golden,exact,search} tests/golden/{shakespeare-*,search}.json "$stage/tests/golden/"
    mkdir "$stage/tests/golden/models"
    cp -r tests/golden/models/{tiny-gpt2,gpu-}* "$stage/tests/golden/models/"
    cp -r deploy/models/shakespeare-draft-1m "$stage/share/baton/models/"
    mkdir "$stage/deploy" # the checks look for models where the source tree has them
    ln -s ../share/baton/models "$stage/deploy/models"
    cp -r deploy/shapes "$stage/deploy/"
    programs=("$stage"/tests/gpu/{check,bench}_* "$stage"/tests/golden/test_engine_{golden,exact,search})
fi

# ---- shared libraries: what ldd names, but not libc's family, nor what belongs to a GPU's driver and CUDA ----
libc='^(ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libmvec|libnsl|libnss_.*|libBrokenLocale)\.so'
cuda='^(libcuda|libcudart|libcublas|libcublasLt|libnccl|libnvidia-.*|libnvrtc)\.so'
needs() { # files... -> lines "soname path"
    ldd "$@" | awk '$3 == "not" {print $1, "missing"} $2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u
}
ucx_dir=$(dirname "$(needs "$build/bin/baton-kvstore" | sed -n 's/^libucs\.so[^ ]* //p')")/ucx
[ -d "$ucx_dir" ] || ucx_dir=${UCX_MODULE_DIR:-}
[ -d "$ucx_dir" ] || die "UCX's module folder is not beside libucs; name it with UCX_MODULE_DIR"
mkdir -p "$lib/ucx"
for m in "$ucx_dir"/lib*.so.0; do
    case $m in # of no use to Baton; Debian 13 has them, and AMD's with all of LLVM behind it
    *_rocm.so.0 | *perftest* | *_fuse.so.0) continue ;;
    esac
    cp -L "$m" "$lib/ucx/"
done

sources=()
while read -r soname path; do
    [[ $soname =~ $libc ]] && continue
    [[ $soname =~ $cuda ]] && continue
    [ "$path" != missing ] || die "$soname is needed and not on this machine"
    cp -L "$path" "$lib/$soname"
    sources+=("$path")
done < <(needs "$stage"/bin/baton-{conductor,kvstore,prefill,decode} "$stage/bin/batonctl" "$lib"/*.so "$lib"/ucx/*.so.0 "$lib/etcd" "${programs[@]}")
chmod 755 "$lib"/*.so* "$lib"/ucx/*
# A library's own search path would win over the executables'.
deploy/bundle/drop-runpath.py "$lib"/lib*.so* "$lib"/ucx/*
for f in "$stage"/bin/* "$lib"/bench/baton-bench-* "$lib"/baton-engine-*.so "${programs[@]}"; do # ours; some of bin are scripts
    [ "$(head -c 4 "$f" | tail -c 3)" != ELF ] || strip --strip-unneeded "$f"
done

# ---- documents, and the licences of the packages whose files are in here ----
sed "s/@VERSION@/$(cat "$build/version")/" deploy/bundle/README.md >"$stage/README.md"
doc=$stage/share/doc/baton
mkdir -p "$doc/licenses"
if command -v dpkg-query >/dev/null; then
    # Debian knows a file by /usr/lib or by /lib. One call for all: each reads the lists of every package.
    mapfile -t known < <(readlink -f "${sources[@]}" "$ucx_dir"/*.so.0)
    { dpkg-query -S "${known[@]}" "${known[@]#/usr}" 2>/dev/null || true; } | cut -d: -f1 | sort -u | while read -r package; do
        [ ! -r "/usr/share/doc/$package/copyright" ] || cp -L "/usr/share/doc/$package/copyright" "$doc/licenses/$package"
    done
fi
third=${etcd%/bin/etcd}/share/doc/etcd-server/copyright
[ ! -r "$third" ] || cp "$third" "$doc/licenses/etcd-server"

# ---- pack: same input, same bytes; the filter for machine code saves a tenth ----
archive=$build/$name.tar.xz
say "packing $(du -sh "$stage" | cut -f1)"
case $(uname -m) in x86_64) filter=(--x86) ;; *) filter=() ;; esac
tar -C "$build/bundle" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct 2>/dev/null || echo 0)" \
    -c "$name" | xz -T1 "${filter[@]}" --lzma2=preset="${BUNDLE_XZ_PRESET:-6}" >"$archive.part"
mv "$archive.part" "$archive"
rm -rf "$build/bundle"
bytes=$(stat -c %s "$archive")
((bytes <= limit)) || die "$archive has $bytes bytes, more than 40 MiB"
say "$bytes bytes; unpack it anywhere, then bin/baton-local up"
echo "$archive"
