"""Making a claim, from its arguments to its :class:`Claim`: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from gpuaff.claims import held, left_out, lost, nested, pinned_far
from gpuaff.claims.claim import Claim
from gpuaff.claims.connections import observe_connections
from gpuaff.claims.contexts import numbers_of
from gpuaff.claims.exported import export
from gpuaff.claims.ground import Enclosing, Ground, Machine
from gpuaff.claims.looking import Looker
from gpuaff.claims.model import ClaimedGpu, Demand, Device, LeftOut, Waiting
from gpuaff.claims.obtain import Attempts, Obtained
from gpuaff.claims.placeholder import Kind, Placeholder, kind_of, occupy
from gpuaff.claims.pool import Bounds, Pool, in_order, named, pool, visible, within
from gpuaff.claims.request import Request, VisibleAs, read
from gpuaff.claims.selection import choose
from gpuaff.claims.strangers import Strangers
from gpuaff.claims.too_late import too_late
from gpuaff.claims.undo import Undo
from gpuaff.errors import (
    ClaimError,
    ClaimLostError,
    CudaInitializedError,
    GpusBusyError,
    InvalidOptionError,
    NotEnoughGpusError,
)
from gpuaff.launch import claimed, inherited
from gpuaff.launch.claimed import Claimed
from gpuaff.notices import Notice
from gpuaff.records import dataclass, replace
from gpuaff.system import environ
from gpuaff.system.nvml import usage_session
from gpuaff.system.nvml_usage import UsageSession

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.binding.grant import Grant
    from gpuaff.launch.ranks import Ranks

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
    if environ.fsroot() is not None:
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
    with held.claiming(undo):
        if held.latched() is None:
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
    if inherited.imports_script() and claimed.observe()[0] is not None:
        from gpuaff.binding.report import say

        say([inherited.IMPORTED], rank=None)


def _yes_or_no(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError(option, value, "True or False")
    return value


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
            lost.stand_back()
            undo.add(held.forget_own)
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
        around = nested.enclosing()
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
        is_told = self.request.visible is not None or held.latched() is not None
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
        latched = held.latched()
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
        undo.add(lambda: held.remember_cuda(gpus))
        if strangers is not None:
            strangers.refuse_early()
        is_alone = self.request.visible is not None and held.latched() is None
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
                lost.remember()
                raise
        said = pinned_far.remarks(gpus) if grant is None else grant.warnings
        if self.request.visible is not None:
            said = (*left_out.remarks(doubtful), *said)
        claim = Claim(
            gpus=gpus,
            obtained=obtained,
            occupied=occupied,
            grant=grant,
            warnings=(*ready.quiet.warnings, *said),
            undo=undo,
        )
        held.remember(claim)
        return claim

    def _grant(self, gpus: Sequence[ClaimedGpu], undo: Undo) -> Grant | None:
        if not self.pin:
            return None
        from gpuaff.binding.grant import take_grant

        return take_grant([gpu.index for gpu in gpus], note=undo.add)

    def _variables(
        self, obtained: Obtained, shown: Sequence[Device], doubtful: Sequence[LeftOut]
    ) -> Mapping[str, str | None]:
        ours: dict[str, str | None] = {claimed.VARIABLE: nested.variable(obtained)}
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
        latched = held.latched()
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
            from gpuaff.claims.safe_gpu_lock import give_back

            give_back(self._handles)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        from gpuaff.claims.safe_gpu_lock import holding, patience

        limit = patience(self._wait)
        with holding(self._wanted, limit=limit, mine=self._handles) as self.warnings:
            yield


def _bounds(around: Claimed | None, *, may_ask: bool) -> Bounds:
    """What this process was given, by its environment; ``qstat`` is asked only for a count."""
    from gpuaff.launch.schedulers import granted

    found = granted(may_ask=may_ask)
    return Bounds(
        visible=environ.get(VISIBLE),
        device_order=environ.get(ORDER),
        granted=found.indices,
        granted_count=found.count,
        source=found.source,
        around=None if around is None else around.uuids,
    )


def _sharers(visible: int, around: Claimed | None) -> Ranks | None:
    """The ranks that were given so many GPUs together; None where they are this process's own."""
    from gpuaff.launch.sharers import observe

    return observe(visible=visible, claim=around)
