"""Making a claim, from its arguments to its :class:`Claim`: all of it, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from gpuaff._system import env
from gpuaff._system.nvml import usage_session
from gpuaff._system.nvml_usage import UsageSession
from gpuaff.claims import state
from gpuaff.claims.attempts import Attempts, Obtained
from gpuaff.claims.candidates import Bounds, Pool, in_order, named, pool, visible, within
from gpuaff.claims.claim import Claim
from gpuaff.claims.devices import conflicts
from gpuaff.claims.devices.conflicts import Strangers
from gpuaff.claims.devices.probe import Looker
from gpuaff.claims.devices.selection import choose, observe_connections
from gpuaff.claims.locking import registry
from gpuaff.claims.locking.registry import Entry
from gpuaff.claims.model import ClaimedGpu, Demand, Device, LeftOut, Waiting
from gpuaff.claims.placeholder import Kind, Placeholder, kind_of, numbers_of, occupy
from gpuaff.claims.placeholder.cuda_errors import too_late
from gpuaff.claims.request import Request, VisibleAs, read
from gpuaff.claims.sources import Enclosing, Ground, Machine
from gpuaff.claims.state import Undo
from gpuaff.errors import (
    ClaimError,
    ClaimLostError,
    CudaInitializedError,
    GpusBusyError,
    InvalidOptionError,
    NotEnoughGpusError,
)
from gpuaff.launch import inherited
from gpuaff.launch.inherited import ParentClaim
from gpuaff.notices import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.launch.ranks import Ranks
    from gpuaff.pinning.grant import Grant

# A claim inside a claim: it takes from what encloses it, and never from the machine.


def enclosing() -> ParentClaim | None:
    """The claim in which this process runs, by the variable that it has set; None without one.

    Raises:
        ClaimError: the variable tells of a claim that is over, or of none.
        LockDirectoryError: the board cannot be used.
    """
    found, notice = inherited.observe_parent_claim()
    if notice is not None:
        raise ClaimError(notice.message)
    if found is None:
        return None
    for entry in registry.entries():
        told = entry.slot, entry.waits, entry.pid, entry.start or 0  # without /proc: not known
        if told == (found.slot, False, found.pid, found.started) and _has(entry, found.uuids):
            return found
    raise ClaimError(
        f"{inherited.CLAIM_VARIABLE} says that this process runs inside a claim of process "
        f"{found.pid}, and that is over, or not what it says (or was made with another "
        "GPUAFF_LOCK_DIR): its GPUs may be somebody else's by now; unset "
        f"{inherited.CLAIM_VARIABLE}, "
        "CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER to claim from the machine"
    )


def _has(entry: Entry, uuids: Iterable[str]) -> bool:
    """Whether these are what an entry of the board holds: a claim inside another says whose too.

    In this order, by which its ranks know which byte stands for which.
    """
    held = [key if key[:1] in "GM" else key.partition("/")[2] for key in entry.gpus]
    return [*uuids] == held


def variable(obtained: Obtained) -> str:
    """What tells those that this process starts of its claim."""
    me = registry.about_me()
    uuids = tuple(device.uuid for device in obtained.devices)
    number = obtained.slot.number
    return str(ParentClaim(slot=number, pid=me["pid"], started=me["start"] or 0, uuids=uuids))


# The variables that a claim sets, and their way back.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Variables that were set.

    Attributes:
        before: what each was; None where it was unset.
        ours: what it was set to; None where it was unset.
    """

    before: Mapping[str, str | None]
    ours: Mapping[str, str | None]

    def put_back(self) -> None:
        """Set each to what it was; one that somebody has changed since is theirs."""
        for name, value in self.before.items():
            if env.get(name) == self.ours[name]:
                env.put(name, value)


def export(variables: Mapping[str, str | None], undo: Undo) -> None:
    """Set variables, for this process and those that it starts; None unsets one."""
    before = {name: env.get(name) for name in variables}
    undo.add(Exported(before=before, ours=dict(variables)).put_back)
    for name, value in variables.items():
        env.put(name, value)


# Whether a process was pinned before it claimed, and now sits far from what it got.


def pinned_far_notices(gpus: Sequence[ClaimedGpu]) -> tuple[Notice, ...]:
    """What to say of the CPUs that this process was put on, and of the GPUs that it has claimed.

    A process that was not pinned pays nothing: the machine is read only for one that was. Nothing
    is said of a GPU whose near CPUs it may not use at all: then there is nothing that would help.
    """
    pinning = sys.modules.get("gpuaff.pinning.state")
    process = None if pinning is None else pinning.remembered()
    if process is None or process.share is None:
        return ()
    from gpuaff.allocator.model import Scope
    from gpuaff.allocator.proximity import Neighbourhood
    from gpuaff.cpuset import format_cpulist
    from gpuaff.pinning.report import say
    from gpuaff.topology.live import observe

    topology = observe(links=False, accelerators=False)
    search = Neighbourhood(topology, topology.cpus)
    known = topology.gpu_by_index
    far = []
    for index in sorted({gpu.index for gpu in gpus} & known.keys()):
        near = search.near(known[index], Scope.NODE)
        within_reach = near.is_local and not near.cpus.isdisjoint(process.original)
        if within_reach and near.cpus.isdisjoint(process.share):
            far.append(f"GPU {index} ({format_cpulist(near.cpus)})")
    if not far:
        return ()
    notice = Notice(
        "pinned-far",
        f"set_affinity() was called before the claim, and has put this process on the CPUs "
        f"{format_cpulist(process.share)}; none of them is near {' or '.join(far)}, which it has "
        "claimed: claim first, or with pin=True, or call set_affinity() again now",
    )
    say([notice], rank=None)
    return (notice,)


# GPUs that do not respond: numbers mean nothing beside one, as CUDA may count it or not.


def left_out_notices(left_out: Sequence[LeftOut]) -> tuple[Notice, ...]:
    """What to say of a claim beside such GPUs; one without a MIG instance is no fault."""
    lost = [one for one in left_out if not one.cut]
    if not lost:
        return ()
    from gpuaff.pinning.report import say

    notice = Notice(
        "visible-lost",
        f"{'; '.join(map(str, lost))}. CUDA may count such a GPU or not, so CUDA_VISIBLE_DEVICES "
        "names the claimed GPUs by UUID, and numbers that stood there were read as nvidia-smi's; "
        "look for Xid in dmesg, and reset the GPU or reboot",
    )
    say([notice], rank=None)
    return (notice,)


VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def make(
    n: object,
    *,
    undo: Undo,
    placeholder: object,
    pin: object,
    own_is_free: object,
    on_wait: Callable[[Waiting], object] | None,
    let_rest: Callable[[], None],
    arguments: Mapping[str, object],
) -> Claim:
    """See :func:`gpuaff.claim_gpus`.

    Args:
        n: as there.
        undo: gets the ways back; who calls takes them when anything is raised.
        placeholder: as there.
        pin: as there.
        own_is_free: as there.
        on_wait: as there.
        let_rest: called when the driver need not be kept awake any more.
        arguments: the others, by name.
    """
    request = read(n, **arguments)
    kind = kind_of(placeholder)
    if on_wait is not None and not callable(on_wait):
        raise InvalidOptionError("on_wait", on_wait, "a function of one argument, or None")
    if env.fsroot() is not None:
        raise ClaimError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be claimed here: unset it"
        )
    making = Making(
        request=request,
        kind=kind,
        pin=_yes_or_no("pin", pin),
        own_is_free=_yes_or_no("own_is_free", own_is_free),
        on_wait=on_wait,
    )
    with state.claiming(undo):
        if state.latched() is None:
            why = too_late()
            if why is not None:
                raise CudaInitializedError(why)
        with usage_session() as session:
            let_rest()
            try:
                return making.claim(session, undo)
            except (GpusBusyError, NotEnoughGpusError):
                _remark_if_imported()
                raise


def _remark_if_imported() -> None:
    if inherited.imports_script() and inherited.observe_parent_claim()[0] is not None:
        from gpuaff.pinning.report import say

        say([inherited.IMPORTED], rank=None)


def _yes_or_no(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError(option, value, "True or False")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What is known when a claim can begin.

    Attributes:
        session: asks the driver.
        shown: the devices that it tells of.
        bounds: what this process was given, by others.
        looker: looks at the devices; None inside a claim, where nobody else is.
        quiet: keeps other libraries' users from choosing at the same time.
        attempts: tries to obtain devices.
    """

    session: UsageSession
    shown: tuple[Device, ...]
    bounds: Bounds
    looker: Looker | None
    quiet: _Quiet
    attempts: Attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """One call of ``claim_gpus``."""

    request: Request
    kind: Kind
    pin: bool
    own_is_free: bool
    on_wait: Callable[[Waiting], object] | None

    def claim(self, session: UsageSession, undo: Undo) -> Claim:
        """Claim, pin and occupy: all, or nothing."""
        with ExitStack() as kept:
            ready = self.ready(session, kept)
            conflicts.stand_back()
            undo.add(state.forget_own)
            undo.add(ready.quiet.end)
            undo.add(ready.attempts.undo)
            try:
                obtained = ready.attempts.obtain(wait=self.request.wait, on_wait=self.on_wait)
                claim = self._use(obtained, ready, undo)
            except BaseException:
                try:
                    with suppress(Exception):  # the first error tells more
                        undo()
                finally:
                    with suppress(Exception):
                        undo()  # Ctrl-C may have come in the first
                raise
        return claim

    def ready(self, session: UsageSession, kept: ExitStack) -> Ready:
        """Find out what is to be claimed, and from where.

        Args:
            session: asks the driver.
            kept: what is to be held until the devices are occupied goes here.
        """
        shown = session.devices()
        around = enclosing()
        bounds = _bounds(around, may_ask=self.request.count is None)
        bounds = replace(bounds, left_out=session.left_out())
        if self.request.count is None:
            bounds = replace(bounds, sharers=_sharers(len(within(shown, bounds)), around))
        self._refuse_unknown_order(shown, bounds)
        wanted = pool(shown, self._request(shown), bounds)
        looker = Looker(
            session,
            wanted.devices,
            demand=Demand(
                min_free_memory=self.request.min_free_memory,
                max_utilization=self.request.max_utilization,
            ),
            own_is_free=self.own_is_free,
        )
        ground: Ground = Machine(looker=looker)
        if around is not None:
            ground = Enclosing(slot=around.slot, gpus=around.uuids, devices=wanted.devices)
        choice = _Choice(wanted, looker, session, in_order=self.request.gpus is not None)
        quiet = _Quiet(wanted.count, self.request.wait, inside=around is not None)
        return Ready(
            session=session,
            shown=shown,
            bounds=bounds,
            looker=looker if around is None else None,
            quiet=quiet,
            attempts=Attempts(ground, wanted, choose=choice, quiet=quiet, kept=kept),
        )

    def _refuse_unknown_order(self, shown: Sequence[Device], bounds: Bounds) -> None:
        """Without our variables CUDA numbers unlike GPUs as it likes: it must be asked (D6)."""
        is_told = self.request.visible is not None or state.latched() is not None
        if is_told or isinstance(self.kind, Placeholder):
            return
        codes = {note.code for note in visible(shown, bounds).notes}
        if "visible-lost" in codes:
            expected = (
                "index or uuid: how CUDA numbers the GPUs beside a lost one is not known before "
                f"it is started ({'; '.join(map(str, bounds.left_out))}); or name the GPUs by UUID "
                "in CUDA_VISIBLE_DEVICES"
            )
            raise InvalidOptionError("visible", None, expected)
        if "visible-order" in codes:
            expected = (
                "index or uuid: the GPUs here are unlike, and how CUDA numbers them is not known "
                "before it is started; or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
            raise InvalidOptionError("visible", None, expected)

    def _request(self, shown: Sequence[Device]) -> Request:
        """After an earlier claim CUDA shows its GPUs for good: only those may be asked for."""
        latched = state.latched()
        if latched is None:
            return self.request
        asked, uuids = self.request, tuple(gpu.uuid for gpu in latched)
        exactly = named("gpus", asked.gpus or uuids, shown)
        some = named("candidates", asked.candidates or uuids, shown)
        fits = asked.count in (None, len(uuids)) and {device.uuid for device in exactly} == {*uuids}
        if not fits or not {*uuids} <= {device.uuid for device in some}:
            raise CudaInitializedError(
                "CUDA was started under an earlier claim of this process, and shows for good what "
                f"that had, {', '.join(uuids)}: only these can be claimed again, all of them; for "
                "others start the program again (in a notebook: restart the kernel)",
                uuids,
            )
        return replace(asked, gpus=uuids, candidates=None, count=len(uuids))

    def _use(self, obtained: Obtained, ready: Ready, undo: Undo) -> Claim:
        """Show the devices to CUDA, pin, occupy, and look whether somebody has come between."""
        looker, shown = ready.looker, ready.shown
        strangers = None  # those inside our claim are not: there nobody looks
        if looker is not None and self.kind is not None:
            strangers = Strangers(looker, obtained.devices)
        doubtful = ready.session.left_out()  # again: one may be lost by now
        export(self._variables(obtained, shown, doubtful), undo)
        ordinals = self._ordinals(obtained, shown, ready.bounds)
        gpus = tuple(
            ClaimedGpu(
                index=device.index,
                uuid=device.uuid,
                pci_bus_id=device.pci_bus_id,
                local=local,
                name=device.name,
            )
            for local, device in zip(ordinals, obtained.devices, strict=True)
        )
        grant = self._grant(gpus, undo)  # first: what CUDA allocates comes from there
        undo.add(lambda: state.remember_cuda(gpus))
        if strangers is not None:
            strangers.refuse_early()
        is_alone = self.request.visible is not None and state.latched() is None
        occupied = occupy(
            self.kind,
            [gpu.uuid for gpu in gpus],
            ordinals=None if is_alone else ordinals,
            note=undo.add,
        )
        if strangers is not None and occupied.made_context:
            try:
                strangers.refuse(self.kind, occupied, ordinals)
            except ClaimLostError:
                conflicts.remember()
                raise
        said = pinned_far_notices(gpus) if grant is None else grant.warnings
        if self.request.visible is not None:
            said = (*left_out_notices(doubtful), *said)
        claim = Claim(
            gpus=gpus,
            obtained=obtained,
            occupied=occupied,
            grant=grant,
            warnings=(*ready.quiet.warnings, *said),
            undo=undo,
        )
        state.remember(claim)
        return claim

    def _grant(self, gpus: Sequence[ClaimedGpu], undo: Undo) -> Grant | None:
        if not self.pin:
            return None
        from gpuaff.pinning.grant import take_grant

        return take_grant([gpu.index for gpu in gpus], note=undo.add)

    def _variables(
        self, obtained: Obtained, shown: Sequence[Device], doubtful: Sequence[LeftOut]
    ) -> Mapping[str, str | None]:
        ours: dict[str, str | None] = {inherited.CLAIM_VARIABLE: variable(obtained)}
        how = self.request.visible
        if how is None:
            return ours
        by_uuid = how is VisibleAs.UUID or any(device.is_mig for device in obtained.devices)
        if by_uuid or doubtful:
            names = [device.uuid for device in obtained.devices]
        else:
            places = sorted({device.index for device in shown})  # CUDA counts what it may use
            names = [str(places.index(device.index)) for device in obtained.devices]
        return {**ours, VISIBLE: ",".join(names), ORDER: "PCI_BUS_ID"}

    def _ordinals(
        self, obtained: Obtained, shown: Sequence[Device], bounds: Bounds
    ) -> tuple[int, ...]:
        """CUDA's numbers of the claimed devices in this process."""
        latched = state.latched()
        if latched is not None:
            known = {gpu.uuid: gpu.local for gpu in latched}
            return tuple(known[device.uuid] for device in obtained.devices)
        if self.request.visible is not None:
            return tuple(range(len(obtained.devices)))
        if isinstance(self.kind, Placeholder):
            uuids = [device.uuid for device in obtained.devices]
            return numbers_of(uuids, str(self.kind))
        seen = in_order(shown, visible(shown, bounds))
        for device in obtained.devices:
            if device not in seen:  # a MIG instance beside whole GPUs
                expected = f"index or uuid: as it is, CUDA does not show {device.uuid}"
                raise InvalidOptionError("visible", None, expected)
        return tuple(seen.index(device) for device in obtained.devices)


class _Choice:
    """Chooses among free devices; connections are asked for once, and only where they matter."""

    def __init__(
        self, wanted: Pool, looker: Looker, session: UsageSession, *, in_order: bool
    ) -> None:
        self._count, self._looker = wanted.count, looker
        self._topology = None
        matters = not in_order and wanted.count < len(wanted.devices)
        if matters and not any(one.is_mig for one in wanted.devices):
            self._topology = observe_connections(session)

    def __call__(self, free: Sequence[Device]) -> tuple[Device, ...]:
        if self._topology is None:
            return tuple(free[: self._count])
        indices = [device.index for device in free]
        chosen = choose(self._count, indices, topology=self._topology, idle=self._looker.idle)
        return tuple(device for device in free if device.index in chosen)


class _Quiet:
    """Keeps safe_gpu's users from choosing; inside a claim they do not come into question.

    Attributes:
        warnings: that it could not.
    """

    def __init__(self, wanted: int, wait: float | None, *, inside: bool) -> None:
        self._wanted, self._wait, self._inside = wanted, wait, inside
        self.warnings: tuple[Notice, ...] = ()
        self._handles: list[int] = []

    def end(self) -> None:
        """Let them choose, if they cannot yet: Ctrl-C may come between any two steps."""
        if self._handles:
            from gpuaff.claims.locking.safe_gpu import give_back

            give_back(self._handles)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        from gpuaff.claims.locking.safe_gpu import holding, patience

        limit = patience(self._wait)
        with holding(self._wanted, limit=limit, mine=self._handles) as self.warnings:
            yield


def _bounds(around: ParentClaim | None, *, may_ask: bool) -> Bounds:
    """What this process was given, by its environment; ``qstat`` is asked only for a count."""
    from gpuaff.launch.allocation import granted

    found = granted(may_ask=may_ask)
    return Bounds(
        visible=env.get(VISIBLE),
        device_order=env.get(ORDER),
        granted=found.indices,
        granted_count=found.count,
        source=found.source,
        around=None if around is None else around.uuids,
    )


def _sharers(visible: int, around: ParentClaim | None) -> Ranks | None:
    """The ranks that were given so many GPUs together; None where they are this process's own."""
    from gpuaff.launch.allocation import observe_sharers

    return observe_sharers(visible=visible, claim=around)


# What a claim would get now. No lock is taken, nobody waits, and nothing is changed.


def preview(n: object, *, arguments: Mapping[str, object]) -> tuple[Device, ...]:
    """The devices that ``claim_gpus`` would take at this moment, in CUDA's order.

    Args:
        n: as there.
        arguments: those of its arguments that say what is asked for, by name.

    Raises:
        GpuaffError: what a claim that does not wait would raise.
    """
    making = Making(
        request=read(n, **arguments),
        kind=kind_of(None),
        pin=False,
        own_is_free=True,
        on_wait=None,
    )
    with usage_session() as session, ExitStack() as kept:
        return making.ready(session, kept).attempts.preview()
