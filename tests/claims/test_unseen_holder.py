"""A holder whom /proc/locks does not show: one outside of our PID namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff.claims.locking import registry
from tests.claims.lockers import locker, until
from tests.fakedriver.driver import FakeDriver
from tests.processes import stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("mounts", "unshare")]

HOLD = """
lease = Lease()
for uuid in {uuids!r}:
    assert lease.take([Device(index=0, uuid=uuid)]) is None
print("has them")
hear()
lease.release()
print("released")
hear()
"""

CLAIM = """
import sys
import gpuaff
print("claims")
claim = gpuaff.claim_gpus(1, placeholder=None, wait=60)
print("has it")
sys.stdin.readline()
claim.release()
print("released")
sys.stdin.readline()
"""


@pytest.mark.case("E5")
def test_a_lease_that_cannot_be_seen_is_waited_for_and_leaves_one_slot(
    lock_folder: Path, driver: FakeDriver
) -> None:
    """Its attempt to lease takes a slot, and its place in the queue must not be a second one."""
    uuids = [gpu.uuid.decode() for gpu in driver.state.gpus[: driver.state.gpu_count]]
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder), "GPUAFF_SAFE_GPU": "off"}
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with locker(HOLD.format(uuids=uuids)) as holder:
        holder.heard()
        with stopped(CLAIM, env=env, prefix=apart) as claimer:
            assert claimer.heard() == "claims"
            until(
                lambda: [(entry.waits, entry.ticket) for entry in registry.entries()] == [(True, 1)]
            )
            holder.go_on()
            assert claimer.heard() == "has it"
            (entry,) = registry.entries()
            assert not entry.waits
            assert entry.gpus[0] in uuids
            claimer.go_on()
            assert claimer.heard() == "released"
            assert registry.entries() == ()
