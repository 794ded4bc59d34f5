#!/bin/bash
# make deb: Debian packages of this tree in build/debian. Usage: build.sh RELEASE [cuda]
# The packaging lies in deploy/debian, dpkg-buildpackage wants it in debian: it gets a folder of its own, which has
# nothing but the packaging, and compiles this tree with Debian's flags in build/deb.
# DEB_VERSION: version of the packages (default: the release). DEBEMAIL: their maintainer (default: the last commit's
# author). DEBUG_PACKAGES=1: with packages of debug symbols.
set -euo pipefail
cd "$(dirname "$0")/../.."
release=$1 cuda=${2:-}
die() { printf 'deb: %s\n' "$*" >&2; exit 1; }
command -v dpkg-buildpackage >/dev/null && command -v dh >/dev/null ||
    die "dpkg-buildpackage or dh is missing; install dpkg-dev and debhelper"
version=${DEB_VERSION:-$release}
mail=${DEBEMAIL:-$(git log -1 --format=%ae 2>/dev/null || true)}
[ -n "$mail" ] || die "this is no git checkout; name the packages' maintainer with DEBEMAIL"
stamp=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y deploy/VERSION)

work=build/deb/work
rm -rf "$work"
mkdir -p "$work/baton" build/debian
cp -r deploy/debian "$work/baton/debian"
cd "$work/baton"
if [ "$cuda" = cuda ]; then
    sed -i 's/^#cuda //' debian/control
else
    sed -i '/^#cuda /d' debian/control
    rm debian/baton-worker-cuda.*
fi
sed -i "s/@MAINTAINER@/$mail/" debian/control
mkdir -p debian/source
echo '3.0 (native)' >debian/source/format
{
    printf 'baton (%s) unstable; urgency=medium\n\n' "$version"
    printf '  * Release %s: see CHANGELOG.md in the package baton-doc.\n\n' "$release"
    printf ' -- Baton maintainers <%s>  %s\n' "$mail" "$(date -u -R -d "@$stamp")"
} >debian/changelog
source=$(cd ../../../.. && pwd)
env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS -u LDFLAGS -u CFLAGS -u CPPFLAGS SOURCE="$source" OBJECTS=build/deb \
    dpkg-buildpackage -b -us -uc "-j$(nproc)" >../log 2>&1 || {
    tail -30 ../log >&2
    die "dpkg-buildpackage failed; $work/log has all of it"
}
cd ../../../..
rm -f build/debian/*
mv "$work"/*.deb "$work"/*.buildinfo "$work"/*.changes build/debian/
ls build/debian/*.deb
