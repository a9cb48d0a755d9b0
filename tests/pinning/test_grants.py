"""What a grant is, for any machine: the borders of its GPUs, all of them or none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.domains import gpu_domains
from gpuaff.pinning.grant import grant_of
from tests.allocator.random_machines import any_machine


@given(st.data())
def test_strangers_grants_are_apart(data: st.DataObject) -> None:
    """However the GPUs are dealt out; with every GPU somebody has every CPU."""
    topology = data.draw(any_machine())
    found = gpu_domains(topology)
    usable = sorted(gpu for gpu, cpus in found.items() if cpus)
    whole = topology.with_allowed(topology.cpus)
    deal = {gpu: data.draw(st.integers(0, 2)) for gpu in usable}
    grants = [grant_of(whole, [g for g in usable if deal[g] == who]) for who in range(3)]
    assert all(why is None for _, why in grants)
    assert frozenset().union(*(cpus for cpus, _ in grants)) == frozenset().union(*found.values())
    assert sum(len(cpus) for cpus, _ in grants) == sum(map(len, found.values()))
    for gpu in usable:
        lacks_one = topology.cpus - {data.draw(st.sampled_from(sorted(found[gpu])))}
        cpus, why = grant_of(topology.with_allowed(lacks_one), usable)
        assert why is not None
        assert (cpus, why.code) == (frozenset(), "grant-unpinned")
