"""How Sphinx builds these pages; warnings are errors (``sphinx-build -W``)."""

from __future__ import annotations

from gpuaff import __version__

project = "gpuaff"
author = "The gpuaff developers"
copyright = "The gpuaff developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Every reference to a name of ours must resolve. Python's own names would need its inventory,
# which a build without a network does not have.
nitpicky = True
nitpick_ignore = [("py:attr", "Topology.numa_nodes")]  # its page calls it gpuaff.Topology
nitpick_ignore_regex = [
    ("py:.*", r"bool|bytes|dict|float|frozenset|int|list|object|set|str|tuple|type|optional"),
    ("py:.*", r"(collections|enum|os|pathlib|typing)\..*"),
    ("py:.*", r"tuple\[~gpuaff\.notices\.Notice"),  # Sphinx cuts "tuple[Notice, ...]" in two
    ("py:.*", r"Any|Enum|Iterable|Mapping|Path|Sequence"),
    ("py:.*", r"(gpuaff\.errors\._)?[A-Za-z]*Error|Exception"),
]

html_theme = "furo"
html_title = "gpuaff"
html_show_sourcelink = False

# What docs/partition.md draws with.
doctest_global_setup = """
from gpuaff.cpuset import parse_cpulist
from gpuaff.topology.model import Gpu, Source, Topology
import gpuaff


def machine(online, *near, l3=None):
    cpus = parse_cpulist(online)
    gpus = tuple(
        Gpu(index=number, node_cpus=parse_cpulist(text), source=Source.GIVEN)
        for number, text in enumerate(near)
    )
    return Topology(
        cpus=cpus,
        allowed=cpus,
        cores=tuple(frozenset((cpu,)) for cpu in sorted(cpus)),
        l3=l3 and tuple(parse_cpulist(text) for text in l3),
        gpus=gpus,
        visible=tuple(range(len(gpus))),
    )


def grant(machine, *gpus):
    from gpuaff.pinning.grant import grant_of

    return grant_of(machine, gpus)[0]


def draw(machine, nproc, **options):
    owners = {}
    for share in gpuaff.plan(machine, nproc, **options).shares:
        for cpu in share.cpus:
            owners[cpu] = "*" if cpu in owners else str(share.rank)
        owners.update(dict.fromkeys(share.reserved, "+"))
    print("|" + "".join(owners.get(cpu, ".") for cpu in sorted(machine.cpus)) + "|")
"""
