"""Making a claim, from its arguments to its :class:`Claim`: all of it, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gpuaff._system import cuda, env
from gpuaff._system.nvml import Session, open_session
from gpuaff.claims import candidates
from gpuaff.claims.attempts import Attempts
from gpuaff.claims.candidates import Request, Supply, VisibleAs, parse_request
from gpuaff.claims.claim import Claim, only_one_claim, state
from gpuaff.claims.devices.conflicts import SecondLook, backing_off
from gpuaff.claims.locking import registry
from gpuaff.claims.model import ClaimedGpu, Device, LeftOut
from gpuaff.claims.placeholder import Placeholder, cuda_already_initialized, numbers_of, occupy
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import (
    ClaimError,
    CudaInitializedError,
    GpusBusyError,
    InvalidOptionError,
    NotEnoughGpusError,
)
from gpuaff.launch import inherited
from gpuaff.launch.allocation import granted
from gpuaff.launch.binding import sharers
from gpuaff.launch.inherited import CLAIM_VARIABLE, ParentClaim
from gpuaff.launch.ranks import ranks
from gpuaff.notices import Notice

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def acquire(arguments: Mapping[str, object], end_prewarm: Callable[[], None]) -> Claim:
    """Do what :func:`gpuaff.claim_gpus` promises, where no signal handler interrupts.

    ``end_prewarm`` is called when the driver need not be kept awake any more.
    """
    request = parse_request(**arguments)
    if env.fsroot() is not None:
        raise ClaimError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be claimed here: unset it"
        )
    with only_one_claim():
        if state.cuda_bound_gpus is None and (why := cuda_already_initialized()):
            raise CudaInitializedError(why)
        with backing_off(), open_session() as session, ExitStack() as undo:
            end_prewarm()
            try:
                attempts = _attempts(session, request)
                _refuse_unknown_order(attempts)  # before any wait
                devices = attempts.obtain(undo)
            except (GpusBusyError, NotEnoughGpusError):
                if inherited.imports_script() and inherited.claim_in_environment()[0] is not None:
                    _warn(inherited.IMPORTED)
                raise
            state.claim = _complete(attempts, devices, undo)
            return state.claim


def preview(arguments: Mapping[str, object]) -> tuple[Device, ...]:
    """The devices that ``claim_gpus`` would take now, in CUDA's order. Nothing is locked."""
    request = parse_request(**arguments)
    with open_session() as session:
        return _attempts(session, request).preview()


def _attempts(session: Session, request: Request) -> Attempts:
    devices, left_out = _devices(session)
    supply = Supply(
        devices=devices,
        left_out=left_out,
        visible=env.get(VISIBLE),
        device_order=env.get(ORDER),
        granted=granted(may_ask=request.count is None),  # qstat is run only for a count
        parent=_parent_claim(),
    )
    if request.count is None:
        shown, _ = candidates.allowed_devices(supply)
        all_ranks = sharers(ranks(), visible=len(shown), claim=supply.parent)
        supply = supply._replace(sharers=all_ranks)
    return Attempts(session, _for_bound_cuda(request, supply), supply)


def _devices(session: Session) -> tuple[tuple[Device, ...], tuple[LeftOut, ...]]:
    """What can be claimed, and what cannot, though CUDA may count it."""
    devices = session.devices()
    bad = candidates.unclaimable(devices)
    left_out = (*session.left_out(), *(LeftOut(one.index, why) for one, why in bad.items()))
    return tuple(device for device in devices if device not in bad), left_out


def _parent_claim() -> ParentClaim | None:
    """The claim in which this process runs, by ``GPUAFF_CLAIM``; ClaimError where it is over."""
    parent, notice = inherited.claim_in_environment()
    if notice is not None:
        raise ClaimError(notice.message)
    # GPUs are compared in order: a position is the byte that ranks lock. Without /proc a start is
    # not known, and 0.
    claims = (
        ParentClaim(entry.slot, entry.pid or 0, entry.start or 0, entry.devices)
        for entry in registry.entries()
        if not entry.waits
    )
    if parent is None or parent in claims:
        return parent
    raise ClaimError(
        f"{CLAIM_VARIABLE} says that this process runs inside a claim of process {parent.pid}, "
        "which is over (or was made with another GPUAFF_LOCK_DIR); to claim from the machine "
        f"unset {CLAIM_VARIABLE}, {VISIBLE} and {ORDER}"
    )


def _for_bound_cuda(request: Request, supply: Supply) -> Request:
    """After an earlier claim CUDA shows its GPUs for good: only those can be claimed."""
    if state.cuda_bound_gpus is None:
        return request
    # CUDA would not use other GPUs, and would go on to use those that were given back.
    uuids = tuple(gpu.uuid for gpu in state.cuda_bound_gpus)
    option = "candidates" if request.gpus is None else "gpus"
    names = request.gpus or request.candidates or uuids
    named = {device.uuid for device in candidates.named_devices(option, names, supply)}
    if request.count not in (None, len(uuids)) or not named.issuperset(uuids):
        raise CudaInitializedError(
            f"CUDA was started under an earlier claim of this process, of {', '.join(uuids)}, and "
            "shows those GPUs for good: claim all of them again, or start the program again (in a "
            "notebook: restart the kernel)",
            uuids,
        )
    return replace(request, gpus=uuids, candidates=None, count=len(uuids))


def _refuse_unknown_order(attempts: Attempts) -> None:
    """Without our variables, only CUDA itself knows how it numbers GPUs that differ (D6)."""
    request = attempts.request
    is_set = request.visible is not None or state.cuda_bound_gpus is not None
    if is_set or isinstance(request.placeholder, Placeholder):
        return
    for note in candidates.shown_by_cuda(attempts.supply)[1]:
        if note.code in ("visible-lost", "visible-order"):
            unknown = f"before CUDA is started, its numbers are not known: {note.message}"
            raise InvalidOptionError("visible", None, f"index or uuid: {unknown}")


def _complete(attempts: Attempts, devices: Sequence[Device], undo: ExitStack) -> Claim:
    """Show leased devices to CUDA, pin, and occupy them; ``undo`` undoes what this does."""
    request = attempts.request
    second_look = SecondLook(attempts.probe, devices)
    _, left_out = _devices(attempts.session)  # again: one may be lost by now
    variables = _variables(attempts, devices, by_uuid=bool(left_out))
    undo.callback(_restore, variables, {name: env.get(name) for name in variables})
    for name, value in variables.items():
        env.put(name, value)
    gpus = tuple(
        ClaimedGpu(index=d.index, uuid=d.uuid, pci_bus_id=d.pci_bus_id, local=local, name=d.name)
        for d, local in zip(devices, _ordinals(attempts, devices), strict=True)
    )
    grant = None
    if request.pin:  # first: CUDA allocates memory there
        from gpuaff.pinning.grant import take_grant

        grant = take_grant([gpu.index for gpu in gpus])
        undo.callback(grant.give_back)
    undo.callback(_remember_bound_gpus, gpus)  # on release: CUDA may be started until then
    claimed = {gpu.local: gpu.uuid for gpu in gpus}
    are_alone = request.visible is not None and state.cuda_bound_gpus is None
    placeholders = occupy(request.placeholder, claimed, undo, are_alone=are_alone)
    is_occupied = request.placeholder is not None and cuda.is_initialized()
    if is_occupied and attempts.supply.parent is None:
        second_look.refuse_others()
    warnings = (
        *attempts.warnings,
        *(_named_by_uuid(left_out) if request.visible is not None else ()),
        *(_pinned_far(attempts.session, gpus) if grant is None else grant.warnings),
    )
    cpus = grant.cpus if grant is not None and grant.pinned else None
    attempts.until_occupied.close()
    held = attempts.lease, attempts.place.slot
    return Claim(gpus, placeholders, warnings, cpus, held, undo.pop_all())


def _named_by_uuid(left_out: Iterable[LeftOut]) -> tuple[Notice, ...]:
    """Warn when GPUs are named by UUID because one does not respond."""
    lost = [str(one) for one in left_out if not one.cut]  # in MIG mode it is no fault
    if not lost:
        return ()
    message = (
        f"{'; '.join(lost)}. CUDA may count such a GPU or not, so {VISIBLE} names the claimed GPUs "
        "by UUID, and numbers in it were read as nvidia-smi's; look for Xid in dmesg, and reset "
        "the GPU or reboot"
    )
    return _warn(Notice("visible-lost", message))


def _variables(attempts: Attempts, devices: Sequence[Device], *, by_uuid: bool) -> dict[str, str]:
    """The variables that a claim sets, for this process and its children."""
    me, visible = registry.about_me(), attempts.request.visible
    names = uuids = tuple(device.uuid for device in devices)
    claim = ParentClaim(attempts.place.slot.number, me["pid"], me["start"] or 0, uuids)
    variables = {CLAIM_VARIABLE: str(claim)}
    if visible is None:
        return variables
    # A GPU that cannot be claimed leaves a gap in our numbers, and perhaps not in CUDA's.
    if not (by_uuid or visible is VisibleAs.UUID or any(one.is_mig for one in devices)):
        places = sorted({device.index for device in attempts.supply.devices})  # as CUDA counts them
        names = tuple(str(places.index(device.index)) for device in devices)
    return {**variables, VISIBLE: ",".join(names), ORDER: "PCI_BUS_ID"}


def _restore(variables: Mapping[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if env.get(name) == value:  # the program has not changed it since
            env.put(name, before[name])


def _ordinals(attempts: Attempts, devices: Sequence[Device]) -> Sequence[int]:
    """CUDA's numbers of the claimed devices in this process."""
    kind = attempts.request.placeholder
    if state.cuda_bound_gpus is not None:
        known = {gpu.uuid: gpu.local for gpu in state.cuda_bound_gpus}
        return [known[device.uuid] for device in devices]
    if attempts.request.visible is not None:
        return range(len(devices))
    if isinstance(kind, Placeholder):
        return numbers_of([device.uuid for device in devices], kind.value)
    shown, _ = candidates.shown_by_cuda(attempts.supply)
    hidden = [device.uuid for device in devices if device not in shown]
    if hidden:  # a MIG instance beside whole GPUs
        expected = f"index or uuid: as it is, CUDA does not show {hidden[0]}"
        raise InvalidOptionError("visible", None, expected)
    return [shown.index(device) for device in devices]


def _remember_bound_gpus(gpus: tuple[ClaimedGpu, ...]) -> None:
    """If CUDA was started under a claim, it shows the GPUs of that claim for good."""
    if cuda.is_initialized():
        state.cuda_bound_gpus = gpus


def _pinned_far(session: Session, gpus: Sequence[ClaimedGpu]) -> tuple[Notice, ...]:
    """Warn when the process was pinned before, and not near the GPUs that it got."""
    # Not of a GPU whose near CPUs this process may not use at all: there is no remedy.
    pinning = sys.modules.get("gpuaff.pinning.state")
    pinned = None if pinning is None else pinning.remembered()
    if pinned is None or pinned.share is None:
        return ()
    claimed = {gpu.index for gpu in gpus}
    near = {one.index: one.node_cpus or frozenset() for one in session.read_gpus()[0]}
    far = [
        f"GPU {index} ({format_cpulist(near[index])})"
        for index in sorted(claimed & near.keys())
        if near[index] & pinned.original and not near[index] & pinned.share
    ]
    if not far:
        return ()
    message = (
        "set_affinity() was called before the claim and pinned this process to CPUs "
        f"{format_cpulist(pinned.share)}, none of them near the claimed {' or '.join(far)}: "
        "claim first, or with pin=True, or call set_affinity() again now"
    )
    return _warn(Notice("pinned-far", message))


def _warn(notice: Notice) -> tuple[Notice]:
    from gpuaff.pinning.state import say

    say([notice])
    return (notice,)
