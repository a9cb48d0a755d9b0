"""The queue's rule on simulated machines: no later waiter ever delays an earlier one.

The time is simulated; who may take which GPU is asked of the queue itself. Later waiters try first
and each chooses by a taste of its own, so that nothing but the rule protects the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaff.claims.locking import queue
from gpuaff.claims.locking.registry import Entry

GPUS = "abcd"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who claims: how long after the one before, what, for how long, and whether it waits."""

    after: int
    wants: frozenset[str]
    count: int
    lasts: int
    waits: bool = True
    taste: Sequence[str] = GPUS


@dataclass(kw_only=True)
class Machine:
    """Four GPUs, and who has them until when."""

    held: dict[str, int] = field(default_factory=dict)
    line: dict[int, Job] = field(default_factory=dict)
    started: dict[int, tuple[int, str]] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job]) -> dict[int, tuple[int, str]]:
        """Let all jobs come and end; when each started that did, and with which GPUs."""
        now, coming = 0, list(enumerate(jobs, 1))
        arrivals = [sum(job.after for job in jobs[:number]) for number, _ in coming]
        while coming or self.line:
            ends = [end for end in self.held.values() if end > now]
            now = min([*arrivals[-len(coming) :], *ends]) if coming else min(ends)
            self.held = {gpu: end for gpu, end in self.held.items() if end > now}
            self.serve(now)
            while coming and arrivals[-len(coming)] == now:
                number, job = coming.pop(0)
                if not self.starts(number, job, now) and job.waits:
                    self.line[number] = job
            self.serve(now)
        return self.started

    def serve(self, now: int) -> None:
        """Let those who wait try, the latest first, until none of them gets anything."""
        while any(
            self.starts(number, self.line[number], now) for number in sorted(self.line)[::-1]
        ):
            pass

    def starts(self, number: int, job: Job, now: int) -> bool:
        ahead = queue.ahead(
            [entry(other, one) for other, one in self.line.items() if other < number],
            wants=job.wants,
            now=0.0,
        )
        free = [gpu for gpu in job.taste if gpu in job.wants and gpu not in self.held]
        mine = [gpu for gpu in free if queue.kept_for(ahead, gpu) is None]
        if len(mine) < job.count:
            earlier = [one.wants for other, one in self.line.items() if other < number]
            unwanted = set(free).difference(*earlier)
            assert len(unwanted) < job.count, "what no earlier waiter wants is served at once"
            return False
        self.line.pop(number, None)
        chosen = mine[: job.count]
        self.held.update(dict.fromkeys(chosen, now + job.lasts))
        self.started[number] = (now, "".join(sorted(chosen)))
        return True


def entry(number: int, job: Job) -> Entry:
    gpus = tuple(sorted(job.wants))
    return Entry(slot=number, waits=True, gpus=gpus, wanted=job.count, ticket=number)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    wants = draw(st.frozensets(st.sampled_from(GPUS), min_size=1))
    return Job(
        after=draw(st.integers(0, 3)),
        wants=wants,
        count=draw(st.integers(1, len(wants))),
        lasts=draw(st.integers(1, 9)),
        waits=draw(st.booleans()),
        taste=draw(st.permutations(GPUS)),
    )


def job(wants: str, lasts: int, *, after: int = 1, taste: str = GPUS, count: int = 1) -> Job:
    return Job(after=after, wants=frozenset(wants), count=count, lasts=lasts, taste=taste)


COUNTED = [
    job("a", 9, after=0),
    job("b", 9, after=0),
    job("ab", 9, taste="bacd"),
    job("a", 9),
    job("b", 9),
]
"""To keep only one of a and b for the third lets the fifth have b, and the fourth wait."""


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs(), min_size=2, max_size=9), st.data())
def test_start_times_of_earlier_jobs_are_the_same_with_and_without_later_ones(
    line: list[Job], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(line) - 1))
    alone = Machine().run(line[:kept])
    together = Machine().run(line)
    assert {number: at for number, at in together.items() if number <= kept} == alone


def test_to_keep_only_as_many_as_are_needed_would_delay_an_earlier_job() -> None:
    """By hand: 3 wants one of a and b, 4 wants a. Both are freed at 9."""
    started = Machine().run(COUNTED)
    assert started == {
        1: (0, "a"),
        2: (0, "b"),
        3: (9, "b"),
        4: (9, "a"),
        5: (18, "b"),
    }


def test_a_waiter_for_one_gpu_keeps_no_other() -> None:
    """By hand: 2 waits for a until 9, and 3 has b at once."""
    started = Machine().run([job("a", 9, after=0), job("a", 9), job("abcd", 1)])
    assert started == {1: (0, "a"), 2: (9, "a"), 3: (2, "b")}
