"""Making a claim, from its arguments to its :class:`Claim`: all of it, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from gpuaff._system import env
from gpuaff._system.nvml import Session, open_session
from gpuaff.claims.attempts import Attempts, Obtained
from gpuaff.claims.candidates import (
    Limits,
    allowed_devices,
    find_candidates,
    in_cuda_order,
    named_devices,
    resolve_visible,
)
from gpuaff.claims.claim import Claim, Undo, bind_cuda, claiming, state
from gpuaff.claims.devices import conflicts
from gpuaff.claims.devices.conflicts import Strangers
from gpuaff.claims.devices.probe import Probe
from gpuaff.claims.devices.selection import choose, observe_connections
from gpuaff.claims.locking import registry
from gpuaff.claims.model import ClaimedGpu, Demand, Device, LeftOut, Waiting
from gpuaff.claims.placeholder import Kind, Placeholder, kind_of, numbers_of, occupy
from gpuaff.claims.placeholder.cuda_errors import cuda_already_initialized
from gpuaff.claims.request import Request, VisibleAs, parse_request
from gpuaff.claims.sources import HostSource, ParentClaimSource, parent_claim
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.pinning.grant import Grant

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def acquire(
    n: object,
    *,
    placeholder: object,
    pin: object,
    own_is_free: object,
    on_wait: Callable[[Waiting], object] | None,
    driver_is_started: Callable[[], None],
    arguments: Mapping[str, object],
) -> Claim:
    """See :func:`gpuaff.claim_gpus`, which calls it where no signal handler interrupts.

    Args:
        n: how many GPUs, or ``auto``.
        placeholder: what occupies each.
        pin: whether to pin the process near them.
        own_is_free: whether to ignore own processes.
        on_wait: called when the state of a wait changes.
        driver_is_started: called when the driver need not be kept awake any more.
        arguments: the others, by name.
    """
    request = parse_request(n, **arguments)
    kind = kind_of(placeholder)
    if on_wait is not None and not callable(on_wait):
        raise InvalidOptionError("on_wait", on_wait, "a function of one argument, or None")
    if env.fsroot() is not None:
        raise ClaimError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be claimed here: unset it"
        )
    pinned, own_is_free = flag("pin", pin), flag("own_is_free", own_is_free)
    with claiming():
        if state.cuda_bound_gpus is None and (why := cuda_already_initialized()):
            raise CudaInitializedError(why)
        with open_session() as session, ExitStack() as until_occupied, Undo() as undo:
            driver_is_started()
            try:
                setup = _Setup(request, session, until_occupied, own_is_free=own_is_free)
                if request.visible is None and state.cuda_bound_gpus is None:
                    _refuse_unknown_order(setup, kind)
                conflicts.stand_back()
                undo.callback(setup.attempts.release)
                obtained = setup.attempts.obtain(wait=request.wait, on_wait=on_wait)
            except (GpusBusyError, NotEnoughGpusError):
                _warn_if_imported_again()
                raise
            state.claim = _Acquisition(setup, obtained, kind, undo).claim(pin=pinned)
            return state.claim


def preview(n: object, *, arguments: Mapping[str, object]) -> tuple[Device, ...]:
    """The devices that ``claim_gpus`` would take now, in CUDA's order. Nothing is locked.

    Args:
        n: how many GPUs, or ``auto``.
        arguments: those of its arguments that a :class:`Request` has, by name.

    Raises:
        GpuaffError: what a claim that does not wait would raise.
    """
    request = parse_request(n, **arguments)
    with open_session() as session, ExitStack() as until_occupied:
        return _Setup(request, session, until_occupied).attempts.preview()


def _warn_if_imported_again() -> None:
    if inherited.imports_script() and inherited.parent_claim()[0] is not None:
        _warn(inherited.IMPORTED)


def _warn(*notices: Notice) -> None:
    from gpuaff.pinning.state import say

    say(notices, rank=None)


class _Setup:
    """What is claimed, and from where.

    Attributes:
        request: the request; after an earlier claim, for the GPUs to which CUDA is bound.
        session: asks the driver.
        devices: all that NVML shows.
        limits: what limits the choice of this process.
        probe: looks at the candidates; None inside a claim, where only its own ranks are.
        attempts: tries to lease devices.
        warnings: what went wrong without preventing the claim.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        until_occupied: ExitStack,
        *,
        own_is_free: bool = True,
    ) -> None:
        parent = parent_claim()
        self.session, self.devices = session, session.devices()
        self.limits = _limits(self.devices, parent, request, session.left_out())
        self.request = _for_bound_cuda(request, self.devices)
        self.warnings: tuple[Notice, ...] = ()
        candidates = find_candidates(self.devices, self.request, self.limits)
        demand = Demand(
            min_free_memory=request.min_free_memory, max_utilization=request.max_utilization
        )
        probe = Probe(session, candidates.devices, demand=demand, own_is_free=own_is_free)
        self.probe = probe if parent is None else None
        self._probe, self._count = probe, candidates.count
        self._topology = None
        is_open = request.gpus is None and candidates.count < len(candidates.devices)
        if is_open and not any(one.is_mig for one in candidates.devices):
            self._topology = observe_connections(session)
        self.attempts = Attempts(
            HostSource(probe=probe)
            if parent is None
            else ParentClaimSource(parent=parent, devices=candidates.devices),
            candidates,
            choose=self._choose,
            until_occupied=until_occupied,
            lock_others=self._lock_safe_gpu,
        )

    def _choose(self, free: Sequence[Device]) -> tuple[Device, ...]:
        if self._topology is None:
            return tuple(free[: self._count])
        indices = [device.index for device in free]
        chosen = choose(self._count, indices, topology=self._topology, idle=self._probe.idle)
        return tuple(device for device in free if device.index in chosen)

    @contextmanager
    def _lock_safe_gpu(self) -> Iterator[None]:
        """Keep safe_gpu's users from choosing; inside a claim they never do."""
        if self.probe is None:
            yield
            return
        from gpuaff.claims.locking.safe_gpu import holding, patience

        with holding(self._count, limit=patience(self.request.wait)) as self.warnings:
            yield


def _limits(
    devices: Sequence[Device],
    parent: ParentClaim | None,
    request: Request,
    left_out: Sequence[LeftOut],
) -> Limits:
    """What limits the choice of this process; ``qstat`` is run only for a count."""
    found = granted(may_ask=request.count is None)
    limits = Limits(
        visible=env.get(VISIBLE),
        device_order=env.get(ORDER),
        granted=found.indices,
        granted_count=found.count,
        source=found.source,
        parent_claim=None if parent is None else parent.uuids,
        left_out=left_out,
    )
    if request.count is not None:
        return limits
    shown = len(allowed_devices(devices, limits))
    return replace(limits, sharers=sharers(ranks(), visible=shown, claim=parent))


def _for_bound_cuda(request: Request, devices: Sequence[Device]) -> Request:
    """After an earlier claim CUDA shows its GPUs for good: only those can be claimed."""
    bound = state.cuda_bound_gpus
    if bound is None:
        return request
    uuids = tuple(gpu.uuid for gpu in bound)
    exactly = named_devices("gpus", request.gpus or uuids, devices)
    some = named_devices("candidates", request.candidates or uuids, devices)
    fits = request.count in (None, len(uuids)) and {device.uuid for device in exactly} == {*uuids}
    if not fits or not {*uuids} <= {device.uuid for device in some}:
        raise CudaInitializedError(
            f"CUDA was started under an earlier claim of this process, of {', '.join(uuids)}, and "
            "shows those GPUs for good: claim all of them again, or start the program again (in a "
            "notebook: restart the kernel)",
            uuids,
        )
    return replace(request, gpus=uuids, candidates=None, count=len(uuids))


def _refuse_unknown_order(setup: _Setup, kind: Kind) -> None:
    """Without our variables, only CUDA itself knows how it numbers GPUs that differ (case D6)."""
    if isinstance(kind, Placeholder):
        return
    codes = {note.code for note in resolve_visible(setup.devices, setup.limits).notes}
    expected = ""
    if "visible-lost" in codes:
        lost = "; ".join(map(str, setup.limits.left_out))
        expected = (
            "index or uuid: before CUDA is started it is not known how it numbers the GPUs beside "
            f"a lost one ({lost}); or name the GPUs by UUID in CUDA_VISIBLE_DEVICES"
        )
    elif "visible-order" in codes:
        expected = (
            "index or uuid: the GPUs here differ, and before CUDA is started it is not known how "
            "it numbers them; or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if expected:
        raise InvalidOptionError("visible", None, expected)


@dataclass(frozen=True, slots=True)
class _Acquisition:
    """What follows once devices are leased: show them to CUDA, pin, and occupy them."""

    setup: _Setup
    obtained: Obtained
    kind: Kind
    undo: Undo

    def claim(self, *, pin: bool) -> Claim:
        """Make the claim; whatever it does is undone by ``undo``."""
        setup, undo = self.setup, self.undo
        strangers = None
        if setup.probe is not None and self.kind is not None:
            strangers = Strangers(setup.probe, self.obtained.devices)
        left_out = setup.session.left_out()  # again: one may be lost by now
        _export(self._variables(left_out), undo)
        gpus = self._claimed_gpus()
        grant = _take_grant(gpus, undo) if pin else None  # first: CUDA allocates memory there
        undo.callback(bind_cuda, gpus)
        placeholders = self._occupy(gpus, strangers)
        warnings = _pinned_far(gpus) if grant is None else grant.warnings
        if setup.request.visible is not None:
            warnings = (*_left_out(left_out), *warnings)
        return Claim(
            gpus=gpus,
            obtained=self.obtained,
            placeholders=placeholders,
            grant=grant,
            warnings=(*setup.warnings, *warnings),
            undo=undo.pop_all(),
        )

    def _occupy(
        self, gpus: Sequence[ClaimedGpu], strangers: Strangers | None
    ) -> tuple[object, ...]:
        """Occupy the GPUs, and check that no other process has come onto them meanwhile."""
        if strangers is not None:
            strangers.refuse_early()
        ordinals = [gpu.local for gpu in gpus]
        is_alone = self.setup.request.visible is not None and state.cuda_bound_gpus is None
        uuids = [gpu.uuid for gpu in gpus]
        occupied = occupy(self.kind, uuids, ordinals=None if is_alone else ordinals)
        self.undo.callback(occupied.release)
        if strangers is not None and occupied.made_context:
            try:
                strangers.refuse(self.kind, occupied, ordinals)
            except ClaimLostError:
                conflicts.remember()
                raise
        return occupied.held

    def _variables(self, left_out: Sequence[LeftOut]) -> Mapping[str, str | None]:
        me, obtained = registry.about_me(), self.obtained
        uuids = tuple(device.uuid for device in obtained.devices)
        claim = ParentClaim(
            slot=obtained.slot.number, pid=me["pid"], started=me["start"] or 0, uuids=uuids
        )
        variables: dict[str, str | None] = {inherited.CLAIM_VARIABLE: str(claim)}
        visible_as = self.setup.request.visible
        if visible_as is None:
            return variables
        names: Sequence[str] = uuids
        by_index = visible_as is VisibleAs.INDEX and not left_out
        if by_index and not any(device.is_mig for device in obtained.devices):
            places = sorted({device.index for device in self.setup.devices})  # as CUDA counts them
            names = [str(places.index(device.index)) for device in obtained.devices]
        return {**variables, VISIBLE: ",".join(names), ORDER: "PCI_BUS_ID"}

    def _claimed_gpus(self) -> tuple[ClaimedGpu, ...]:
        return tuple(
            ClaimedGpu(
                index=device.index,
                uuid=device.uuid,
                pci_bus_id=device.pci_bus_id,
                local=local,
                name=device.name,
            )
            for local, device in zip(self._ordinals(), self.obtained.devices, strict=True)
        )

    def _ordinals(self) -> Sequence[int]:
        """CUDA's numbers of the claimed devices in this process."""
        devices, bound = self.obtained.devices, state.cuda_bound_gpus
        if bound is not None:
            known = {gpu.uuid: gpu.local for gpu in bound}
            return [known[device.uuid] for device in devices]
        if self.setup.request.visible is not None:
            return range(len(devices))
        if isinstance(self.kind, Placeholder):
            return numbers_of([device.uuid for device in devices], str(self.kind))
        limits = self.setup.limits
        shown = in_cuda_order(self.setup.devices, resolve_visible(self.setup.devices, limits))
        for device in devices:
            if device not in shown:  # a MIG instance beside whole GPUs
                expected = f"index or uuid: as it is, CUDA does not show {device.uuid}"
                raise InvalidOptionError("visible", None, expected)
        return [shown.index(device) for device in devices]


def _export(variables: Mapping[str, str | None], undo: Undo) -> None:
    """Set variables, for this process and its children; None unsets one."""
    undo.callback(_restore, {name: env.get(name) for name in variables}, variables)
    for name, value in variables.items():
        env.put(name, value)


def _restore(before: Mapping[str, str | None], ours: Mapping[str, str | None]) -> None:
    """Restore variables, without those that the program has changed since."""
    for name, value in before.items():
        if env.get(name) == ours[name]:
            env.put(name, value)


def _take_grant(gpus: Sequence[ClaimedGpu], undo: Undo) -> Grant:
    from gpuaff.pinning.grant import take_grant

    grant = take_grant([gpu.index for gpu in gpus])
    undo.callback(grant.give_back)
    return grant


def _left_out(left_out: Sequence[LeftOut]) -> tuple[Notice, ...]:
    """Warn of lost GPUs; one in MIG mode without an instance is no fault."""
    lost = [str(one) for one in left_out if not one.cut]
    if not lost:
        return ()
    notice = Notice(
        "visible-lost",
        f"{'; '.join(lost)}. CUDA may count such a GPU or not, so CUDA_VISIBLE_DEVICES names the "
        "claimed GPUs by UUID, and numbers in it were read as nvidia-smi's; look for Xid in dmesg, "
        "and reset the GPU or reboot",
    )
    _warn(notice)
    return (notice,)


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
    from gpuaff.allocator.proximity import Neighbourhood
    from gpuaff.cpuset import format_cpulist
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
    notice = Notice(
        "pinned-far",
        f"set_affinity() was called before the claim and pinned this process to CPUs "
        f"{format_cpulist(process.share)}, none of them near the claimed {' or '.join(far)}: "
        "claim first, or with pin=True, or call set_affinity() again now",
    )
    _warn(notice)
    return (notice,)
