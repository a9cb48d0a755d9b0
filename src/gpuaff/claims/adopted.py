"""The claim of the process that has made this one, in a child that imports its script again."""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff.claims import held, nested
from gpuaff.claims.claim import Claim
from gpuaff.claims.model import ClaimedGpu, Device
from gpuaff.cpuset import CpuSet
from gpuaff.launch import claimed
from gpuaff.launch.claimed import Claimed
from gpuaff.launch.imported_again import is_imported_again
from gpuaff.system import kernel


class AdoptedClaim(Claim):
    """What :func:`gpuaff.claim_gpus` returns in such a child: its maker's claim.

    It is the maker's alone to release, and ends with the maker; the child has no descriptors of it.
    """

    def __init__(self, gpus: tuple[ClaimedGpu, ...]) -> None:
        """Only :func:`gpuaff.claim_gpus` makes them."""
        self.gpus, self.warnings, self.placeholders = gpus, (), ()
        self._is_abandoned = False

    @property
    def fds(self) -> tuple[int, ...]:
        """None: what is spawned inherits none."""
        return ()

    @property
    def cpus(self) -> CpuSet | None:
        """None: which of those that this process was started on came with it is not known here."""
        return None

    @property
    def is_inherited(self) -> bool:
        """True: another process has claimed."""
        return True

    @property
    def is_released(self) -> bool:
        """Whether this process has left it."""
        return self._is_abandoned

    def _abandon(self) -> None:
        held.forget(self)
        self._is_abandoned = True


def makers_claim() -> Claimed | None:
    """The claim that the script's top has made before it was imported again; None elsewhere.

    A claim around both is not meant: in that the maker has claimed, or not, for itself.

    Raises:
        ClaimError: it is over.
        LockDirectoryError: the board cannot be used.
    """
    if not is_imported_again():
        return None
    found, _ = claimed.observe()
    above = kernel.parent_id()
    makers = (above, kernel.parent_of(above) if above is not None else None)  # the fork server's
    return None if found is None or found.pid not in makers else nested.enclosing()


def adopt(theirs: Claimed, devices: Sequence[Device]) -> Claim:
    """Take it over, as a forked child would have it.

    Args:
        theirs: the claim.
        devices: those that CUDA shows here, in its order.
    """
    gpus = tuple(
        ClaimedGpu(
            index=device.index,
            uuid=device.uuid,
            pci_bus_id=device.pci_bus_id,
            local=local,
            name=device.name,
        )
        for local, device in enumerate(devices)
        if device.uuid in theirs.uuids
    )
    claim = AdoptedClaim(tuple(sorted(gpus, key=lambda gpu: theirs.uuids.index(gpu.uuid))))
    held.remember(claim)
    return claim
