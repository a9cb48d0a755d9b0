#!/usr/bin/env bash
# Mutation tests of the allocator and of the visible devices, from nothing:
#   scripts/mutation.sh [JOBS [MUTANTS…]]     MUTANTS: such as 'gpuaff.topology.visible.*'
# Says of how many changes to each module the tests take notice; fails below $MUTATION_MIN % (90).
# Without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder of wheels> scripts/mutation.sh
set -euo pipefail
cd "$(dirname "$0")/.."
: "${MUTATION_MIN:=90}" "${GPUAFF_VENV:=.venv-mutation}"
. scripts/venv.sh
install --group mutation # not gpuaff: mutmut puts its changed copy on the path

rm -rf mutants && mkdir mutants
mutmut run --max-children "${1:-$(nproc)}" "${@:2}" >mutants/run.log || { tail -n 50 mutants/run.log; exit 1; }
tr '\r' '\n' <mutants/run.log | grep mutations/second
mutmut results --all true | grep -v ': not checked$' >mutants/results.txt
grep -v ': killed$' mutants/results.txt || true
sed -E 's/^ *(.*)\.[^.]*: (.*)$/\1 \2/' mutants/results.txt | sort | awk -v least="$MUTATION_MIN" '
  function say() {
    noticed = 100 * (killed + timeout) / all
    printf "%-32s %5d mutants %5d killed %4d timed out  %5.1f %%\n", module, all, killed, timeout, noticed
    failed = failed || noticed < least
    all = killed = timeout = 0
  }
  module && $1 != module { say() }
  { module = $1; all++; killed += $2 == "killed"; timeout += $2 == "timeout" }
  END { say(); exit failed }'
