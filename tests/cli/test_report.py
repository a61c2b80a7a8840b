"""The chart and the table a person looks at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from speculators_ext.cli.chart import draw
from speculators_ext.cli.common import CliError
from speculators_ext.cli.report import check_writable, table
from speculators_ext.cli.rows import Row

PLAIN = Row("vllm", "plain", 1, 30.0, 1.0, None, None, "4/4", 0, 0, 100, 3.0)
CLASP = Row("vllm", "clasp", 1, 45.0, 1.5, 2.6, [0.8, 0.5, 0.3], "3/4", 40, 240, 100, 2.0)
ROWS = [PLAIN, CLASP, replace(PLAIN, concurrency=4), replace(CLASP, concurrency=4)]


def colours_of(path):
    pixels = (image.imread(path)[..., :3] * 255).round().astype(np.uint8)
    return {tuple(int(v) for v in c) for c in np.unique(pixels.reshape(-1, 3), axis=0)}, pixels


def test_chart_is_a_png_with_every_method_drawn(tmp_path):
    """Catches an empty figure, a wrong file type, and a method whose bars are missing."""
    path = tmp_path / "chart.out"
    draw(ROWS, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    colours, pixels = colours_of(path)
    assert {(0x7F, 0x7F, 0x7F), (0x00, 0x72, 0xB2)} <= colours
    assert min(pixels.shape[:2]) > 400


def test_chart_without_drafts_or_with_a_gap_is_still_drawn(tmp_path):
    """Catches a crash where nothing was drafted, or a method has no row at one concurrency."""
    silent = replace(CLASP, mean_acceptance_length=None, acceptance_per_position=None)
    draw([PLAIN, silent, replace(PLAIN, concurrency=4)], tmp_path / "c.png", "title")
    assert (tmp_path / "c.png").stat().st_size > 10_000


@pytest.mark.parametrize("width", [80, 140])
def test_table_shows_what_was_measured_and_claims_nothing_else(width):
    """Catches a column cut away in a narrow terminal, and plain praised for its own text."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table([*ROWS, replace(CLASP, method="clasp, adaptive off")], "title"))
    text = captured.get()
    for shown in ("45.0", "1.50x", "2.60", "0.80 0.50 0.30", "3/4", "adaptive", "speed-up"):
        assert shown in text
    assert "4/4" not in text


def test_table_names_methods_that_did_not_draft():
    """Catches a dash in the acceptance column that nobody explains."""
    console = Console(width=140)
    silent = replace(CLASP, mean_acceptance_length=None, acceptance_per_position=None, num_drafts=0)
    with console.capture() as captured:
        console.print(table([PLAIN, silent], "title"))
    assert "No step was drafted for: clasp." in " ".join(captured.get().split())


def test_output_folder_is_checked_before_measuring(tmp_path):
    """Catches minutes of measuring lost because the chart cannot be written."""
    check_writable(tmp_path / "a.png", None, "b.json")
    with pytest.raises(CliError, match="does not exist"):
        check_writable(tmp_path / "none" / "a.png")
