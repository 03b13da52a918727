"""How similar the models of the clients are at the end, stage by stage, as in FedIN's Figure 6.

    python docs/study/similarity.py gather DIR ...   # add the finished runs of these folders of studies to cka.csv
    python docs/study/similarity.py table            # the mean over seeds, from cka.csv alone

The similarity is linear CKA on 256 test samples, averaged over all pairs of clients. Compared are the models that the
clients sent for the last merge, which a run keeps with `evaluation.client_models: true`, or the clients' own if the
method leaves them with some. Other runs are passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from claims import RUN, Row, add_rows, read_rows

from fleetbed.analysis.figures.changes import files_by_round
from fleetbed.analysis.figures.model_plots import stage_similarity
from fleetbed.analysis.figures.nets import FinalModel, client_models, dataset_of, final_models
from fleetbed.analysis.figures.similarity import off_diagonal_mean
from fleetbed.analysis.tables.runs import Run, open_runs
from fleetbed.analysis.tables.series import series_of
from fleetbed.emulator.data import Dataset
from fleetbed.emulator.records.kept_merges import CLIENTS

TABLE = Path(__file__).with_name("cka.csv")
COLUMNS = (*RUN, "stage", "cka")


def rows_of(folder: Path) -> list[Row]:
    rows: list[Row] = []
    for series in series_of(open_runs([folder])):
        for run in (run for run in series.runs if run.finished):
            dataset = dataset_of(run)
            models = models_of_clients(run, dataset)
            if not models:
                continue
            for stage, matrix in stage_similarity(models, dataset).items():
                values = (folder.name, series.method, series.policy, str(run.config.seed), stage)
                rows.append(dict(zip(COLUMNS, (*values, f"{off_diagonal_mean(matrix):.4f}"), strict=True)))
    return rows


def models_of_clients(run: Run, dataset: Dataset) -> list[FinalModel]:
    if sent := files_by_round(run, CLIENTS):
        return client_models(run, dataset, sent[max(sent)])
    return [model for model in final_models(run, dataset) if model.client is not None]


def means(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the mean over seeds by study, method and policy, then by stage."""
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        stages = values.setdefault((row["study"], row["method"], row["policy"]), {})
        stages.setdefault(row["stage"], []).append(float(row["cka"]))
    return {key: {stage: mean(found) for stage, found in stages.items()} for key, stages in values.items()}


def table(rows: Iterable[Row]) -> str:
    """Return the means as a table, the most similar deepest stage first."""
    found = means(rows)
    stages = list(dict.fromkeys(stage for one in found.values() for stage in one))
    lines = [f"| data | method | policy | {' | '.join(stages)} |", f"|---|---|---|{'---:|' * len(stages)}"]
    for key in sorted(found, key=lambda key: (key[0], -found[key].get(stages[-1], 0.0))):
        shown = (f"{found[key][stage]:.2f}" if stage in found[key] else "–" for stage in stages)
        lines.append(f"| {' | '.join(key)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["gather", _, *_]:
            add_rows(TABLE, COLUMNS, [row for folder in arguments[1:] for row in rows_of(Path(folder))])
        case ["table"]:
            print(table(read_rows(TABLE)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
