#!/bin/bash
# Installs what building (and with --tests: testing, --bundle: packing) Baton needs from the distribution's packages.
# Asks before sudo, names what it installs, starts and enables no service: the packages of etcd and
# Prometheus ship units, so they are unpacked into build/third instead of installed. Does nothing if all is there.
# With --check it only says which packages of the build are missing, and fails if there are any.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=(gcc make git python3-minimal libc6-dev libgrpc-dev libprotobuf-c-dev protobuf-c-compiler libucx-dev
    libjansson-dev libyaml-dev libpcre2-dev libssl-dev openssl libcurl4-openssl-dev libdnnl-dev librocksdb-dev liburing-dev curl ca-certificates)
test_packages=(libcmocka-dev python3 python3-pytest python3-grpcio python3-jsonschema python3-protobuf python3-yaml
    protobuf-compiler python3-grpc-tools iproute2 util-linux)
bundle_packages=(xz-utils binutils)
[ "${1:-}" = --check ] || [ -z "${1:-}" ] || packages+=("${bundle_packages[@]}") # a test packs as well
if [ "${1:-}" = --tests ]; then
    packages+=("${test_packages[@]}")
    # For the openai client's test; any node with npm will do, wherever it comes from.
    command -v node >/dev/null || packages+=(nodejs)
    command -v npm >/dev/null || packages+=(npm)
    # For the web page's test, where the distribution has it as a package.
    if ! command -v chromium >/dev/null && apt-cache show chromium >/dev/null 2>&1; then
        packages+=(chromium fonts-dejavu-core)
    fi
fi

say() { printf 'setup: %s\n' "$*" >&2; }

command -v apt-get >/dev/null || {
    [ "${1:-}" != --check ] || exit 0 # the compiler will name what is missing
    say "this is not Debian or Ubuntu (no apt-get). Install yourself: ${packages[*]} and etcd 3.4 or newer"
    exit 1
}

missing=()
for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done

if [ "${1:-}" = --check ]; then
    [ ${#missing[@]} -eq 0 ] && exit 0
    say "missing packages: ${missing[*]}"
    say "run 'make setup' to install them"
    exit 1
fi
as_root=()
if [ ${#missing[@]} -gt 0 ]; then
    say "missing packages: ${missing[*]}"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { say "run as root: apt-get install ${missing[*]}"; exit 1; }
        as_root=(sudo)
        if [ -t 0 ]; then
            read -r -p "setup: install them with sudo apt-get? [Y/n] " answer
            case "$answer" in [nN]*) say "nothing was installed"; exit 1 ;; esac
        elif ! sudo -n true 2>/dev/null; then
            say "run: sudo apt-get install ${missing[*]}"
            exit 1
        else
            as_root=(sudo -n)
        fi
    fi
    say "updating package lists"
    "${as_root[@]}" apt-get update -qq
    say "installing ${#missing[@]} packages"
    # policy-rc.d is not touched: none of these packages has a service.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        -o Dpkg::Use-Pty=0 "${missing[@]}" | sed -u -n 's/^Setting up \([^ ]*\).*/setup:   \1/p' >&2
fi

# Unpacks a package below build/third: installing it would start its service. unpack NAME PACKAGE
unpack() {
    say "unpacking $1 into build/third/$1"
    local tmp
    tmp=$(mktemp -d)
    chmod 755 "$tmp"
    mkdir -p build/third
    if ! (cd "$tmp" && apt-get download -qq "$2") >/dev/null 2>"$tmp/err"; then
        cat "$tmp/err" >&2
        rm -rf "$tmp"
        return 1
    fi
    dpkg-deb -x "$tmp/$2"_*.deb "build/third/$1"
    rm -rf "$tmp"
    "build/third/$1/usr/bin/$1" --version 2>&1 | sed -n '1s/^/setup:   /p' >&2
}
# A private etcd for local clusters.
if [ ! -x build/third/etcd/usr/bin/etcd ] && ! command -v etcd >/dev/null; then
    unpack etcd etcd-server || { say "cannot download the package etcd-server; run apt-get update and try again"; exit 1; }
fi
# Prometheus, to test rules, alerts and dashboards with.
if [ "${1:-}" = --tests ] && [ ! -x build/third/prometheus/usr/bin/promtool ] && ! command -v promtool >/dev/null; then
    unpack prometheus prometheus || say "cannot download the package prometheus: its tests will be skipped"
fi
