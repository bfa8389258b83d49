#!/usr/bin/env bash
# Programs that tests drive and pip can't bring: strace shows the order of a publish's system calls, and PostgreSQL holds
# the journal of a fleet.
set -euo pipefail

missing=()
command -v strace >/dev/null || missing+=(strace)
if ! command -v postgres >/dev/null && ! compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null; then
  missing+=(postgresql)
fi
if [[ ${#missing[@]} == 0 ]]; then
  exit 0
fi
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "test: installing ${missing[*]}"
  if [[ " ${missing[*]} " == *" postgresql "* && ! -e /etc/postgresql-common ]]; then
    # the tests start servers of their own; the package need not start one
    mkdir -p /etc/postgresql-common/createcluster.d
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/roost.conf
  fi
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
else
  echo "test: needed and not here: install it (apt-get install ${missing[*]})" >&2
  exit 1
fi
