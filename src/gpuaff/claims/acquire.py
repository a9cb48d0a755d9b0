"""Making a claim, from its arguments to its :class:`Claim`: all of it, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gpuaff._system import cuda, env
from gpuaff._system.nvml import Session, open_session
from gpuaff.claims import candidates
from gpuaff.claims.attempts import Attempts, Obtained
from gpuaff.claims.candidates import Limits, Request, VisibleAs, in_cuda_order, resolve_visible
from gpuaff.claims.claim import Claim, Undo, only_one_claim, state
from gpuaff.claims.devices import conflicts
from gpuaff.claims.devices.conflicts import SecondLook
from gpuaff.claims.locking import registry
from gpuaff.claims.model import ClaimedGpu, Device, Waiting
from gpuaff.claims.placeholder import (
    Kind,
    Placeholder,
    cuda_already_initialized,
    kind_of,
    numbers_of,
    occupy,
)
from gpuaff.claims.sources import verified_parent_claim
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import (
    ClaimError,
    ClaimLostError,
    CudaInitializedError,
    GpusBusyError,
    InvalidOptionError,
    NotEnoughGpusError,
)
from gpuaff.launch import inherited
from gpuaff.launch.allocation import granted
from gpuaff.launch.gpus import sharers
from gpuaff.launch.inherited import ParentClaim
from gpuaff.launch.ranks import ranks
from gpuaff.notices import Notice
from gpuaff.options import flag

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def acquire(
    n: object,
    which: Mapping[str, object],
    *,
    placeholder: object,
    pin: object,
    own_is_free: object,
    on_wait: Callable[[Waiting], object] | None,
    end_prewarm: Callable[[], None],
) -> Claim:
    """Do what :func:`gpuaff.claim_gpus` promises, where no signal handler interrupts.

    ``which`` has the arguments of a :class:`Request`, by name; ``end_prewarm`` is called when
    the driver need not be kept awake any more.
    """
    request = candidates.parse_request(n, **which)
    kind = kind_of(placeholder)
    if on_wait is not None and not callable(on_wait):
        raise InvalidOptionError("on_wait", on_wait, "a function of one argument, or None")
    if env.fsroot() is not None:
        raise ClaimError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be claimed here: unset it"
        )
    is_pinned, own_is_free = flag("pin", pin), flag("own_is_free", own_is_free)
    with only_one_claim():
        if state.cuda_bound_gpus is None and (why := cuda_already_initialized()):
            raise CudaInitializedError(why)
        with open_session() as session, ExitStack() as until_occupied, Undo() as undo:
            end_prewarm()
            try:
                acquisition = _Acquisition(session, request, until_occupied, own_is_free)
                acquisition.refuse_unknown_order(kind)
                conflicts.back_off()
                undo.callback(acquisition.attempts.release)
                obtained = acquisition.attempts.obtain(on_wait)
            except (GpusBusyError, NotEnoughGpusError):
                if inherited.imports_script() and inherited.claim_in_environment()[0] is not None:
                    _warn(inherited.IMPORTED)
                raise
            state.claim = acquisition.claim(obtained, kind, undo, pin=is_pinned)
            return state.claim


def preview(n: object, *, arguments: Mapping[str, object]) -> tuple[Device, ...]:
    """The devices that ``claim_gpus`` would take now, in CUDA's order. Nothing is locked.

    Raises:
        GpuaffError: what a claim that does not wait would raise.
    """
    request = candidates.parse_request(n, **arguments)
    with open_session() as session, ExitStack() as until_occupied:
        return _Acquisition(session, request, until_occupied).attempts.preview()


class _Acquisition:
    """What is claimed, and how it becomes a claim.

    After an earlier claim the request is for the GPUs to which CUDA is bound.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        until_occupied: ExitStack,
        own_is_free: bool = True,
    ) -> None:
        self._session, self._devices = session, session.devices()
        self._parent = verified_parent_claim()
        self._limits = _limits(session, self._parent, request)
        self._request = _for_bound_cuda(request, self._devices)
        self.attempts = Attempts(
            session,
            self._request,
            candidates.find_candidates(self._devices, self._request, self._limits),
            self._parent,
            own_is_free=own_is_free,
            until_occupied=until_occupied,
        )

    def refuse_unknown_order(self, kind: Kind) -> None:
        """Without our variables, only CUDA itself knows how it numbers GPUs that differ (D6)."""
        is_set = self._request.visible is not None or state.cuda_bound_gpus is not None
        if is_set or isinstance(kind, Placeholder):
            return
        codes = {note.code for note in resolve_visible(self._devices, self._limits).notes}
        if "visible-lost" in codes:
            which = f"the GPUs beside a lost one ({'; '.join(map(str, self._limits.left_out))})"
            remedy = "name the GPUs by UUID in CUDA_VISIBLE_DEVICES"
        elif "visible-order" in codes:
            which, remedy = "GPUs that differ, as these do", "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        else:
            return
        unknown = f"before CUDA is started it is not known how it numbers {which}"
        raise InvalidOptionError("visible", None, f"index or uuid: {unknown}; or {remedy}")

    def claim(self, obtained: Obtained, kind: Kind, undo: Undo, *, pin: bool) -> Claim:
        """Show leased devices to CUDA, pin, and occupy them; ``undo`` undoes what this does."""
        second_look = None
        if self._parent is None and kind is not None:
            second_look = SecondLook(self.attempts.probe, obtained.devices)
        left_out = self._session.left_out()  # again: one may be lost by now
        _export(self._variables(obtained, by_uuid=bool(left_out)), undo)
        ordinals = self._ordinals(obtained.devices, kind)
        gpus = tuple(
            ClaimedGpu(
                index=device.index,
                uuid=device.uuid,
                pci_bus_id=device.pci_bus_id,
                local=ordinal,
                name=device.name,
            )
            for ordinal, device in zip(ordinals, obtained.devices, strict=True)
        )
        grant = None
        if pin:  # first: CUDA allocates memory there
            from gpuaff.pinning.grant import take_grant

            grant = take_grant([gpu.index for gpu in gpus])
            undo.callback(grant.give_back)
        undo.callback(_remember_bound_gpus, gpus)
        placeholders = self._occupy(gpus, kind, second_look, undo)
        lost = [str(one) for one in left_out if not one.cut]  # in MIG mode it is no fault
        more = _pinned_far(gpus) if grant is None else grant.warnings
        if lost and self._request.visible is not None:
            more = (*_lost(lost), *more)
        return Claim(
            gpus=gpus,
            obtained=obtained,
            placeholders=placeholders,
            grant=grant,
            warnings=(*self.attempts.warnings, *more),
            undo=undo.pop_all(),
        )

    def _variables(self, obtained: Obtained, *, by_uuid: bool) -> dict[str, str]:
        me, devices = registry.about_me(), obtained.devices
        uuids = tuple(device.uuid for device in devices)
        slot, started = obtained.slot.number, me["start"] or 0
        claim = ParentClaim(slot=slot, pid=me["pid"], started=started, uuids=uuids)
        variables = {inherited.CLAIM_VARIABLE: str(claim)}
        visible_as = self._request.visible
        if visible_as is None:
            return variables
        names: Sequence[str] = uuids
        # A GPU that cannot be claimed leaves a gap in our numbers, and perhaps not in CUDA's.
        by_uuid = by_uuid or visible_as is VisibleAs.UUID or any(one.is_mig for one in devices)
        if not by_uuid:
            places = sorted({device.index for device in self._devices})  # as CUDA counts them
            names = [str(places.index(device.index)) for device in devices]
        return {**variables, VISIBLE: ",".join(names), ORDER: "PCI_BUS_ID"}

    def _ordinals(self, devices: Sequence[Device], kind: Kind) -> Sequence[int]:
        """CUDA's numbers of the claimed devices in this process."""
        if (bound := state.cuda_bound_gpus) is not None:
            known = {gpu.uuid: gpu.local for gpu in bound}
            return [known[device.uuid] for device in devices]
        if self._request.visible is not None:
            return range(len(devices))
        if isinstance(kind, Placeholder):
            return numbers_of([device.uuid for device in devices], str(kind))
        shown = in_cuda_order(self._devices, resolve_visible(self._devices, self._limits))
        for device in devices:
            if device not in shown:  # a MIG instance beside whole GPUs
                expected = f"index or uuid: as it is, CUDA does not show {device.uuid}"
                raise InvalidOptionError("visible", None, expected)
        return [shown.index(device) for device in devices]

    def _occupy(
        self, gpus: Sequence[ClaimedGpu], kind: Kind, second_look: SecondLook | None, undo: Undo
    ) -> tuple[object, ...]:
        """Occupy the GPUs, and check that no other process has come onto them meanwhile."""
        if second_look is not None:
            second_look.before_occupying()
        ordinals = [gpu.local for gpu in gpus]
        is_alone = self._request.visible is not None and state.cuda_bound_gpus is None
        uuids = [gpu.uuid for gpu in gpus]
        held, is_started = occupy(kind, uuids, undo, ordinals=None if is_alone else ordinals)
        if second_look is not None and is_started:
            try:
                second_look.after_occupying()
            except ClaimLostError:
                conflicts.remember_loss()
                raise
        return held


def _limits(session: Session, parent: ParentClaim | None, request: Request) -> Limits:
    """What limits the choice of this process; ``qstat`` is run only for a count."""
    limits = Limits(
        visible=env.get(VISIBLE),
        device_order=env.get(ORDER),
        granted=granted(may_ask=request.count is None),
        parent=parent,
        left_out=session.left_out(),
    )
    if request.count is not None:
        return limits
    shown, _ = candidates.allowed_devices(session.devices(), limits)
    return limits._replace(sharers=sharers(ranks(), visible=len(shown), claim=parent))


def _for_bound_cuda(request: Request, devices: Sequence[Device]) -> Request:
    """After an earlier claim CUDA shows its GPUs for good: only those can be claimed."""
    if state.cuda_bound_gpus is None:
        return request
    # CUDA would not use other GPUs, and would go on to use those that were given back.
    uuids = tuple(gpu.uuid for gpu in state.cuda_bound_gpus)
    option = "candidates" if request.gpus is None else "gpus"
    names = request.gpus or request.candidates or uuids
    named = {device.uuid for device in candidates.named_devices(option, names, devices)}
    if request.count not in (None, len(uuids)) or not named.issuperset(uuids):
        raise CudaInitializedError(
            f"CUDA was started under an earlier claim of this process, of {', '.join(uuids)}, and "
            "shows those GPUs for good: claim all of them again, or start the program again (in a "
            "notebook: restart the kernel)",
            uuids,
        )
    return replace(request, gpus=uuids, candidates=None, count=len(uuids))


def _export(variables: Mapping[str, str], undo: Undo) -> None:
    """Set variables, for this process and its children."""
    before = {name: env.get(name) for name in variables}

    def restore() -> None:
        for name, value in variables.items():
            if env.get(name) == value:  # the program has not changed it since
                env.put(name, before[name])

    undo.callback(restore)
    for name, value in variables.items():
        env.put(name, value)


def _remember_bound_gpus(gpus: tuple[ClaimedGpu, ...]) -> None:
    """If CUDA was started under a claim, it shows the GPUs of that claim for good."""
    if cuda.is_initialized():
        state.cuda_bound_gpus = gpus


def _lost(gpus: Sequence[str]) -> tuple[Notice, ...]:
    return _warn(
        Notice(
            "visible-lost",
            f"{'; '.join(gpus)}. CUDA may count such a GPU or not, so CUDA_VISIBLE_DEVICES names "
            "the claimed GPUs by UUID, and numbers in it were read as nvidia-smi's; look for Xid "
            "in dmesg, and reset the GPU or reboot",
        )
    )


def _pinned_far(gpus: Sequence[ClaimedGpu]) -> tuple[Notice, ...]:
    """Warn when the process was pinned before, and not near the GPUs that it got.

    A process that was not pinned pays nothing for this. A GPU whose near CPUs this process may not
    use at all gives no warning, since there is no remedy.
    """
    pinning = sys.modules.get("gpuaff.pinning.state")
    process = None if pinning is None else pinning.remembered()
    if process is None or process.share is None:
        return ()
    from gpuaff.allocator.model import Scope
    from gpuaff.allocator.placement import Neighbourhood
    from gpuaff.topology.live import observe

    topology = observe(links=False, accelerators=False)
    search = Neighbourhood(topology, topology.cpus)
    far = []
    for index in sorted({gpu.index for gpu in gpus} & topology.gpu_by_index.keys()):
        near = search.near(topology.gpu_by_index[index], Scope.NODE)
        within_reach = near.is_local and not near.cpus.isdisjoint(process.original)
        if within_reach and near.cpus.isdisjoint(process.share):
            far.append(f"GPU {index} ({format_cpulist(near.cpus)})")
    if not far:
        return ()
    return _warn(
        Notice(
            "pinned-far",
            "set_affinity() was called before the claim and pinned this process to CPUs "
            f"{format_cpulist(process.share)}, none of them near the claimed {' or '.join(far)}: "
            "claim first, or with pin=True, or call set_affinity() again now",
        )
    )


def _warn(notice: Notice) -> tuple[Notice, ...]:
    from gpuaff.pinning.report import say

    say((notice,), rank=None)
    return (notice,)
