#!/bin/bash
# Installs units, sysusers and tmpfiles under LIB and example configurations in CONF. Nothing is started or enabled.
# PREFIX in the environment is where the binaries are; CONF there, where the daemons will find their configurations if
# that is not CONF (a package is made in a staging folder). Usage: install.sh LIB CONF; of an unpacked bundle in /opt/baton:
#   PREFIX=/opt/baton /opt/baton/share/baton/systemd/install.sh /etc /etc/baton
set -euo pipefail
cd "$(dirname "$0")"
[ $# -eq 2 ] || { echo "usage: PREFIX=DIR install.sh LIB CONF" >&2; exit 2; }
lib=$1 conf=$2 found=${CONF-$2}
put() { # source target
    install -d "$(dirname "$2")"
    sed "s|@PREFIX@|${PREFIX-/usr/local}|g; s|/etc/baton|$found|g" "$1" >"$2"
    chmod 644 "$2"
}
for f in *.service *.target *.d/*.conf; do put "$f" "$lib/systemd/system/$f"; done
put baton.sysusers "$lib/sysusers.d/baton.conf"
put baton.tmpfiles "$lib/tmpfiles.d/baton.conf"
install -d "$conf"
for f in ../config/*.yaml; do put "$f" "$conf/$(basename "$f").example"; done
