#!/usr/bin/env bash
# The tests, from nothing. Arguments go to pytest: scripts/test.sh --slow tests/topology
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install -e '.[cli]' --group tests
exec python -m pytest -n auto "$@"
