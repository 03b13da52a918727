"""Style of the figures: one colour and marker per method everywhere, one dash per policy, legible in print.

The colours are those of Okabe and Ito, which are distinct for people with any common colour blindness, without the
yellow, which is too pale on paper, and with a grey for references.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbed.analysis.tables.series import Series
from fleetbed.profiles.yaml_text import plain

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F6368")
GREY = COLOURS[-1]
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = {
    "sync": "solid",
    "deadline": (0, (5, 2)),
    "over-select": (0, (5, 2, 1, 2)),
    "async": (0, (1, 1.5)),
    "buffered": (0, (3, 1, 1, 1, 1, 1)),
}
#: A method's position here determines its look; methods in the same column share a colour. Append new ones.
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
    slot: int

    @property
    def colour(self) -> str:
        return COLOURS[self.slot % len(COLOURS)]

    @property
    def marker(self) -> str:
        return MARKERS[self.slot // len(COLOURS) % len(MARKERS)]


#: within one method, each policy has its own colour and marker
POLICY_LOOKS = {policy: Look(place * (len(COLOURS) + 1)) for place, policy in enumerate(DASHES)}


def looks(series: Sequence[Series]) -> dict[str, Look]:
    """Return the look of each method, by its title.

    A label that a user chose gets the look of its hash, or the next one if that colour is already used in the figure.
    """
    titles = sorted({one.method for one in series})
    known = {title: SAME.get(name, name) for title in titles for name in [title.lower().replace("_", "-")]}
    found = {title: Look(KNOWN.index(name)) for title, name in known.items() if name in KNOWN}
    for title in titles:
        if title not in found:
            found[title] = Look(_free_slot(title, {look.slot for look in found.values()}))
    return found


def _free_slot(title: str, taken: set[int]) -> int:
    slots = len(COLOURS) * len(MARKERS)
    start = int.from_bytes(hashlib.blake2b(title.encode(errors="replace"), digest_size=4).digest(), "big") % slots
    used = {slot % len(COLOURS) for slot in taken}
    order = [(start + step) % slots for step in range(slots)]
    # first a colour that is not used in this figure, then any free slot
    fresh = [slot for slot in order if slot % len(COLOURS) not in used]
    return next((slot for slot in [*fresh, *order] if slot not in taken), start)


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
