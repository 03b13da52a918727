"""The results of studies and runs in Python: their records as tables, their report, their figures, a comparison."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from fleetbed.analysis.tables.export import TABLES, columns_of
from fleetbed.analysis.tables.runs import DATABASE, Run, RunNotStarted, find_runs, open_run
from fleetbed.analysis.tables.writing import missing_extra
from fleetbed.emulator.records.study_file import STUDY, parse_study
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.yaml_text import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

StrPath = str | os.PathLike[str]


class RecordTable(Sequence[dict[str, Any]]):
    """A table as plain rows: a sequence of mappings from the columns to values.

    `notes` are sentences that a reader of the table should know.
    """

    def __init__(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.columns = tuple(columns)
        self.notes = tuple(notes)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> RecordTable: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | RecordTable:
        if isinstance(place, slice):
            return RecordTable(self.name, self.columns, self._rows[place], self.notes)
        return dict(zip(self.columns, self._rows[place], strict=True))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self._rows)

    def __repr__(self) -> str:
        return f"<fleetbed table {self.name}: {len(self)} rows, columns {', '.join(self.columns)}>"

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise missing_extra("to_pandas()", "pandas", "pandas") from error
        return pandas.DataFrame.from_records(list(self._rows), columns=list(self.columns))

    def to_arrow(self) -> Any:
        """Return a pyarrow Table."""
        try:
            import pyarrow
        except ImportError as error:
            raise missing_extra("to_arrow()", "pyarrow", "parquet") from error
        values = zip(*self._rows, strict=True) if self._rows else ([] for _ in self.columns)
        return pyarrow.table({name: list(each) for name, each in zip(self.columns, values, strict=True)})


class Figures(Mapping[str, "Figure"]):
    """Figures by name. A notebook shows them; `save` writes them as PNG and PDF."""

    def __init__(self, figures: Mapping[str, Figure]) -> None:
        self._figures = dict(figures)

    def __getitem__(self, name: str) -> Figure:
        return self._figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def save(self, folder: StrPath) -> list[Path]:
        """Write every figure into this folder; return the files."""
        from fleetbed.analysis.figures.plot import save_figures

        return save_figures(self._figures, Path(folder))

    def _repr_html_(self) -> str:
        from fleetbed.analysis.figures.style import png_bytes

        pictures = (base64.b64encode(png_bytes(figure)).decode() for figure in self._figures.values())
        return "".join(f'<img style="max-width:100%" src="data:image/png;base64,{each}">' for each in pictures)


class Results:
    """The records of runs so far. Load a run that is still going again to see more.

    `clients`, `tasks`, `rounds`, `evaluations`, `metrics`, `caps` and `notices` are tables over all runs; their first
    columns say which run a row is of, and its values of a sweep.
    """

    def __init__(self, folder: Path, runs: Sequence[Run], unstarted: Sequence[str] = ()) -> None:
        self.folder = folder
        self.runs = tuple(runs)
        self.unstarted = tuple(unstarted)  # names of runs that have recorded nothing yet

    def __repr__(self) -> str:
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"<fleetbed results of {count} in {plain(str(self.folder))}>"

    @property
    def finished(self) -> bool:
        """Whether every run is done."""
        return not self.unstarted and all(run.finished for run in self.runs)

    @property
    def states(self) -> dict[str, str]:
        """How far each run has got, by its name."""
        return {run.name: run.state for run in self.runs} | dict.fromkeys(self.unstarted, "not started")

    @cached_property
    def clients(self) -> RecordTable:
        return self._table("clients")

    @cached_property
    def tasks(self) -> RecordTable:
        return self._table("tasks")

    @cached_property
    def rounds(self) -> RecordTable:
        return self._table("rounds")

    @cached_property
    def evaluations(self) -> RecordTable:
        return self._table("evaluations")

    @cached_property
    def metrics(self) -> RecordTable:
        return self._table("metrics")

    @cached_property
    def caps(self) -> RecordTable:
        return self._table("caps")

    @cached_property
    def notices(self) -> RecordTable:
        return self._table("notices")

    def _table(self, name: str) -> RecordTable:
        assert name in TABLES
        own = columns_of(name)
        swept = list(dict.fromkeys(key for run in self.runs for key in run.config.point))
        rows = []
        for run in self.runs:
            config = run.config
            values = (config.point.get(key) for key in swept)
            first = (run.name, config.algorithm.title, config.policy.title, config.seed, *values)
            rows += [(*first, *(getattr(row, column) for column in own)) for row in getattr(run, name)]
        return RecordTable(name, ("run", "method", "policy", "seed", *swept, *own), rows)

    def compare(
        self, *, base: str | None = None, targets: Sequence[float] = (), series: str | None = None
    ) -> RecordTable:
        """Compare the methods: accuracy, cost to reach the targets, differences to `base` paired by seed."""
        from fleetbed.analysis.tables.compare import compare_runs, records

        found = compare_runs(self._some(), base, targets, series)
        rows = records(found)
        columns = list(rows[0]) if rows else []
        return RecordTable("comparison", columns, [list(row.values()) for row in rows], found.notes)

    def report(
        self,
        out: StrPath | None = None,
        *,
        base: str | None = None,
        targets: Sequence[float] = (),
        series: str | None = None,
    ) -> Path:
        """Write the report as an HTML page, by default into the folder of the results; return its path."""
        from fleetbed.analysis.page.report import write_report

        page = self.folder / "report.html" if out is None else Path(out)
        return write_report(self._some(), page, base, targets, series)[0]

    def plot(self, kind: str, *, targets: Sequence[float] = (), series: str | None = None) -> Figures:
        """Draw a kind of figure, such as "time", "rounds", "bytes" or "pareto"; `fleetbed plot --help` lists them."""
        from fleetbed.analysis.figures.plot import draw_figures

        return Figures(draw_figures(kind, self._some(), targets, series))

    def _some(self) -> tuple[Run, ...]:
        if not self.runs:
            raise BadInput(f"{self.folder}: no run has recorded anything yet; load it again later.")
        return self.runs


def load(*folders: StrPath) -> Results:
    """Read the results in the folders of studies or runs, whether they are finished, still going or were killed."""
    if not folders:
        raise BadInput("fleetbed.load needs the folder of a study or a run.")
    paths = [Path(folder) for folder in folders]
    planned = [run for path in paths for run in _planned(path)]
    found: dict[Path, Run] = {}
    for folder in find_runs([path for path in paths if not _has_no_run_yet(path)]):
        with contextlib.suppress(RunNotStarted):
            run = open_run(folder)
            found[run.folder] = run
    return Results(paths[0], list(found.values()), [path.name for path in planned if path not in found])


def _planned(folder: Path) -> list[Path]:
    """The folders that the runs of a study have or will have; of a run, its own."""
    path = folder / STUDY
    if not path.is_file():
        return [folder.resolve()] if (folder / DATABASE).is_file() else []
    try:
        study = parse_study(path.read_bytes(), path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}).") from error
    except BadInput:  # of another version; its runs can be read nevertheless
        return []
    return [folder.resolve() / config.name for config in runs(study.experiment)]


def _has_no_run_yet(folder: Path) -> bool:
    """Whether this is a study of which no run has begun."""
    return (folder / STUDY).is_file() and not any(folder.glob(f"*/{DATABASE}"))


def compare(
    *results: Results | StrPath, base: str | None = None, targets: Sequence[float] = (), series: str | None = None
) -> RecordTable:
    """Compare the methods of several results, or folders of them."""
    loaded = [each if isinstance(each, Results) else load(each) for each in results]
    if not loaded:
        raise BadInput("fleetbed.compare needs results, or the folder of a study or a run.")
    runs = {run.folder: run for each in loaded for run in each.runs}
    return Results(loaded[0].folder, list(runs.values())).compare(base=base, targets=targets, series=series)
