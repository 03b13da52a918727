"""Style of the figures: one colour and marker per series, one dash per policy, legible in print.

The first seven colours are those of Okabe and Ito, which are distinct for people with any common colour blindness,
without the yellow, which is too pale on paper, and without the second blue, for which there are black and grey. The
other four are less so; there the marker helps.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbed.analysis.tables.series import Series
from fleetbed.profiles.yaml_text import plain

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#1A1A1A", "#9AA0A6"),
    *("#7B1FA2", "#6B3A1E", "#9BBD00", "#C2184A"),
)
GREY = "#5F6368"  # of target lines and other references
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = {
    "sync": "solid",
    "deadline": (0, (5, 2)),
    "over-select": (0, (5, 2, 1, 2)),
    "async": (0, (1, 1.5)),
    "buffered": (0, (3, 1, 1, 1, 1, 1)),
}
#: A method's position here determines its look, unless another method of the figure has its colour. Append new ones.
KNOWN = (
    *("heteroavg", "fedin", "inco", "fedhe", "fedhenn", "heteroprox", "private"),
    *("fedavg", "fedin-noise", "inco-prox", "fedmd", "fedhenn-homo", "fedprox", "all-small"),
    *("all-large", "moon", "heterofl", "fedgkt", "fedrep", "scaffold", "homo"),
    *("fednova", "scalefl", "fedrolex", "inclusivefl"),
)
SAME = {"inco-heteroavg": "inco", "inco-heteroprox": "inco-prox"}

RC: Any = {  # Any: matplotlib types its keys one by one
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#D9DCE0",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text in the paper's PDF
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a label is a dollar sign
}


@dataclass(frozen=True)
class Look:
    """A colour and a marker. Because 11 and 6 have no common divisor, no two of 66 slots share both."""

    slot: int

    @property
    def colour_number(self) -> int:
        return self.slot % len(COLOURS)

    @property
    def marker_number(self) -> int:
        return self.slot % len(MARKERS)

    @property
    def colour(self) -> str:
        return COLOURS[self.colour_number]

    @property
    def marker(self) -> str:
        return MARKERS[self.marker_number]


SLOTS = len(COLOURS) * len(MARKERS)
OWN_DASH = (0, (8, 2))  # of policies of users


def policy_looks(series: Sequence[Series]) -> dict[str, Look]:
    """Return the look of each policy, by its name, for panels of one method."""
    names = dict.fromkeys((*DASHES, *(one.policy for one in series)))
    return {policy: Look(place) for place, policy in enumerate(names)}


def looks(series: Sequence[Series]) -> dict[str, Look]:
    """Return the look of each series, by its label: up to six differ in both colour and marker, up to eleven in colour.

    The first series of a known method has the method's own look. Any other gets the look of its label's hash, or the
    next one whose colour and marker are not used yet.
    """
    own: dict[str, int] = {}
    for one in series:
        name = one.method.lower().replace("_", "-")
        name = SAME.get(name, name)
        if name in KNOWN and KNOWN.index(name) not in own.values():
            own[one.label] = KNOWN.index(name)
    found: dict[str, Look] = {}
    for label in sorted(own, key=own.__getitem__):
        found[label] = _free_look(own[label], found.values())
    for label in sorted(one.label for one in series if one.label not in own):
        digest = hashlib.blake2b(label.encode(errors="replace"), digest_size=4).digest()
        found[label] = _free_look(int.from_bytes(digest, "big") % SLOTS, found.values())
    return found


def _free_look(wanted: int, taken: Collection[Look]) -> Look:
    """Return the first look from `wanted` on with a free colour and marker, else a free colour, else any free one."""
    order = [Look((wanted + step) % SLOTS) for step in range(SLOTS)]
    colours, markers = {look.colour for look in taken}, {look.marker for look in taken}
    fresh = [look for look in order if look.colour not in colours]
    best = [look for look in fresh if look.marker not in markers]
    return next((look for look in [*best, *fresh, *order] if look not in taken), order[0])


def legend_label(text: str) -> str:
    """Return a label that a legend shows: matplotlib hides labels that start with an underscore."""
    shown = plain(text)
    return f" {shown}" if shown.startswith("_") else shown


def save(figure: Any, stem: Path) -> list[Path]:
    """Save as PNG for screens and PDF for papers; the same figure gives the same bytes."""
    import matplotlib as mpl

    written = []
    with mpl.rc_context(RC):
        for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
            path = stem.with_name(f"{stem.name}.{kind}")
            figure.savefig(path, metadata=metadata)
            written.append(path)
    return written


def png_bytes(figure: Any) -> bytes:
    """Return the figure as the bytes of a PNG."""
    import matplotlib as mpl

    content = io.BytesIO()
    with mpl.rc_context(RC):
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
