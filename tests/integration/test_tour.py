"""The notebook in docs/ is executed by a real kernel, as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"
#: in a process of its own, because the kernel's client has warnings that are not ours
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
for cell in book.cells:
    if cell.cell_type == "code":
        cell.outputs = []
NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(book, sys.argv[3])
"""


@pytest.mark.slow
def test_the_tour_is_executed(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel are in the dev extra")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are in the dev extra")
    out = tmp_path / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(tmp_path), str(out)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in nbformat.read(out, as_version=4).cells if cell.cell_type == "code"]
    shown = [str(cell.outputs) for cell in cells]
    assert all(shown), "every cell shows something"
    (run,) = (text for text in shown if "heteroavg-sync-1" in text and "done" in text and "run 1 of 2" in text)
    assert "round 4/4" in run, "the line of progress reached the last round"
    assert any("data:image/png;base64," in text for text in shown)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
