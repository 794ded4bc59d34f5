#!/bin/bash
# Installs units, sysusers and tmpfiles under LIB (usually PREFIX/lib). PREFIX in the environment is what the units name.
# Nothing is started or enabled. Usage: install.sh LIB
set -euo pipefail
cd "$(dirname "$0")"
lib=$1
put() { # source target
    install -d "$(dirname "$2")"
    sed "s|@PREFIX@|${PREFIX-/usr/local}|g" "$1" >"$2"
    chmod 644 "$2"
}
for f in *.service *.target *.d/*.conf; do put "$f" "$lib/systemd/system/$f"; done
put baton.sysusers "$lib/sysusers.d/baton.conf"
put baton.tmpfiles "$lib/tmpfiles.d/baton.conf"
