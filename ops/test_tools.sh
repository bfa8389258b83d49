#!/usr/bin/env bash
# Programs that tests drive and pip can't bring: strace shows the order of a publish's system calls.
set -euo pipefail

if command -v strace >/dev/null; then
  exit 0
fi
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "test: installing strace"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq strace >/dev/null
else
  echo "test: strace is needed and is not here: install it (apt-get install strace)" >&2
  exit 1
fi
