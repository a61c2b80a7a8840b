"""The table and the picture of `reasoning_step.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Rows = dict[str, dict[str, Any]]


def table_of(rows: Rows, title: str) -> Table:
    """A row a variant."""
    table = Table(title=title)
    columns = "variant;right;sound steps;target forwards a token;tok/s;speed-up;accepted;as plain"
    for column in columns.split(";"):
        table.add_column(column)
    for name, row in rows.items():
        share = row["steps_accepted"]
        table.add_row(
            name,
            f"{row['accuracy']:.3f}",
            f"{row['sound_steps']:.3f}",
            f"{row['forwards_per_token']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            "" if share is None else f"{share:.2f}",
            f"{row['identical']}/{row['problems']}",
        )
    return table


def draw(rows: Rows, judges: Iterable[str], path: Path, title: str) -> None:
    """Right answers over target forwards a token, and over speed; defaults are ringed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    curves = {judge: [n for n in rows if n.startswith(f"{judge} ")] for judge in judges}
    others = [n for n in rows if not any(n in names for names in curves.values())]
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("forwards_per_token", "speedup"),
        ("target forwards a token", "tokens a second, plain target = 1"),
        strict=True,
    ):
        for judge, colour in zip(curves, ("#0072b2", "#e69f00"), strict=True):
            names = curves[judge]
            x, y = [rows[n][key] for n in names], [rows[n]["accuracy"] for n in names]
            axes.plot(x, y, "o-", color=colour, label=f"reasoning_step, {judge}")
            for name, at in zip(names, zip(x, y, strict=True), strict=True):
                axes.annotate(name.split()[1], at, fontsize=7, xytext=(3, 3),
                              textcoords="offset points")  # fmt: skip
                if rows[name]["default"]:
                    axes.plot(*at, "o", markersize=12, fillstyle="none", color=colour)
        for name, marker in zip(others, "s^DvPX*", strict=False):
            axes.plot([rows[name][key]], [rows[name]["accuracy"]], marker, label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("right answers")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.8)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path, format="png")
