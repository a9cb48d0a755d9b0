"""Ctrl-C between any two steps of the interpreter: all of a claim is there, or nothing of it."""

from __future__ import annotations

import os
import random

import pytest

from tests.claim_lab import Lab

pytestmark = pytest.mark.fake_driver

PROGRAM = """
import random, signal
from gpuaff._system.nvml import open_session

signal.signal(signal.SIGINT, signal.default_int_handler)
rng = random.Random(int(sys.stdin.readline()))
options = json.loads(sys.stdin.readline())
TRACED = "/gpuaff/", "contextlib.py", "<program>"

class Steps:
    # Counts the interpreter's steps, and interrupts at one of them.
    def __init__(self, at=0):
        self.at, self.count = at, 0

    def follow(self, work):
        sys.settrace(self.enter)
        try:
            work()
        finally:
            sys.settrace(None)

    def enter(self, frame, event, _):
        if frame.f_code is Steps.follow.__code__:
            return None
        if not any(part in frame.f_code.co_filename for part in TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, _):
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        return self.step

def contexts():
    with open_session() as session:
        return [one.device.index for one in session.look() if os.getpid() in (one.compute or {})]

def all_of_it():
    return {**state(), "contexts": contexts()}

def differs_from(before):
    after = all_of_it()
    others = {key: before[key] for key in before if key != "contexts"}
    found = differs(others, {key: after[key] for key in others})
    return {**found, **({"contexts": after["contexts"]} if after["contexts"] else {})}

def claim():
    gpuaff.claim_gpus(2, **options)

def release():
    gpuaff.current_claim().release()

def claim_in_block():
    with gpuaff.claim_gpus(2, **options):
        pass

def whole(claim):
    # All of a claim: its leases, its contexts, its variables and its slot.
    return (
        not claim.is_released
        and len(claim.gpus) == 2
        and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        and contexts() == ([0, 1] if options.get("placeholder", 1) else [])
        and all(os.fstat(handle) for handle in claim.fds)
        and len(locked()) >= 3
    )

def settle():
    held = gpuaff.current_claim()
    if held is not None:
        held.release()

def one(work, at):
    # Interrupt it at a step; what is wrong then. None where it ended before that step.
    if work is release:
        claim()
    steps = Steps(at)
    try:
        steps.follow(work)
    except KeyboardInterrupt:
        interrupted = True
    else:
        interrupted = False
    held = gpuaff.current_claim()
    wrong = [] if held is None or whole(held) else ["half a claim"]
    if not interrupted and steps.count >= at:
        wrong.append("not interrupted")
    settle()
    wrong += map(str, differs_from(before).items())
    return wrong if wrong or interrupted else None

claim(); settle()  # all is imported, and CUDA is started
before = all_of_it()
WORKS = [claim, release, claim_in_block]
lengths = {}
for work in WORKS:
    if work is release:
        claim()
    steps = Steps()
    steps.follow(work)
    lengths[work] = steps.count
    settle()
turns, done = int(sys.stdin.readline()), 0
while done < turns:
    work = WORKS[done % len(WORKS)]
    # Every second one near the end or the beginning, where a block has just begun or ended.
    edge = rng.choice([rng.randint(1, 150), lengths[work] - rng.randint(0, 150)])
    at = rng.choice([rng.randint(1, lengths[work]), min(max(edge, 1), lengths[work])])
    wrong = one(work, at)
    done += wrong is not None
    if wrong:
        say(work.__name__, at, "of", lengths[work], *wrong)
say("end", *lengths.values())
"""


def interrupt(lab: Lab, turns: int, options: str = "{}") -> None:
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"SEED={seed}")
    program = lab.start(PROGRAM)
    for line in (str(seed), options, str(turns)):
        program.go_on(line)
    said = []
    while not (line := program.heard()).startswith("end"):
        said.append(line)
    print(line)
    assert said == []
    assert lab.used() == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "turns"), [("{}", 60), ('{"pin": true, "placeholder": null}', 30)]
)
def test_at_random_steps(lab: Lab, options: str, turns: int) -> None:
    interrupt(lab, turns, options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["{}", '{"pin": true}', '{"placeholder": null}'])
def test_at_many_random_steps(lab: Lab, options: str) -> None:
    interrupt(lab, int(os.environ.get("TURNS", "600")), options)


@pytest.mark.parametrize("options", ["", ", placeholder=None"])
def test_at_the_end_of_a_claim_it_is_released(lab: Lab, options: str) -> None:
    """All is had, and the caller would not get it: Ctrl-C is raised, and nothing is left."""
    code = f"""
    def trace(frame, event, _):
        if frame.f_code.co_name == "acquire" and event == "return":
            signal.raise_signal(signal.SIGINT)
        return trace
    before = state()
    sys.settrace(trace)
    told(refused(2{options}))
    sys.settrace(None)
    say(differs(before, state()), gpuaff.current_claim())
    go_on()
    """
    program = lab.start(code)
    assert program.heard() == "KeyboardInterrupt"
    assert program.heard() == "{} None"
    assert lab.used() == []
