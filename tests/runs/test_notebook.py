"""examples/demo.ipynb runs from its first cell to its last: `make test-notebook`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windfall import __version__

NOTEBOOK = Path(__file__).parents[2] / "examples" / "demo.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_notebook_has_no_outputs_and_names_this_version() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells("code"))
    assert f'"windfall-{__version__}-py3-none-any.whl"' in "".join(cells("code")[0]["source"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    notebook = nbformat.reads(NOTEBOOK.read_text().replace("STEPS = 20", "STEPS = 4"), as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    text = "".join(out["text"] for out in outputs if out["output_type"] == "stream")
    assert "4/4" in text or "step 4" in text, text
    assert [out for out in outputs if "image/png" in out.get("data", {})]
    assert (tmp_path / "runs" / "notebook" / "page.html").is_file()
