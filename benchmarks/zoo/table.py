"""What is printed of the zoo's rows: a line each, a table, and a summary."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ogc.graph import table as aligned

Row = dict[str, Any]

VERDICTS = ("equal", "different", "refused", "error", "not tried", "plain cannot", "plain")


def brief(row: Row) -> str:
    return f"{row['name']}: {row['verdict']}{_figures(row)}{'; ' + row['detail'][:200] if row['detail'] else ''}"


def _figures(row: Row) -> str:
    if "ogc_bytes" not in row:
        return f", {row['plain_bytes'] / 1e6:.2f} MB" if "plain_bytes" in row else ""
    parts = f" in {row['parts']} parts" if row.get("parts", 1) > 1 else ""
    leaves = (
        f"{parts}, {row['leaves']} leaves, the largest with {row['leaf_share']:.0%}" if row.get("leaves") else parts
    )
    return (
        f", {row['plain_bytes'] / 1e6:.2f} -> {row['ogc_bytes'] / 1e6:.2f} MB (predicted "
        f"{row['predicted_bytes'] / 1e6:.2f}), {row['operations']} operations{leaves}, "
        f"planned in {row['plan_seconds']:.1f} s"
    )


def table(rows: list[Row]) -> str:
    heads = ["name", "verdict", "plain MB", "ogc MB", "predicted", "operations", "leaves", "largest", "plan s"]
    return str(aligned(heads, [_cells(row) for row in rows]))


def _cells(row: Row) -> list[str]:
    if "ogc_bytes" not in row:
        said = f"{row['verdict']}: {row['detail'][:70]}" if row["detail"] else row["verdict"]
        return [row["name"], said, f"{row['plain_bytes'] / 1e6:.2f}" if "plain_bytes" in row else "", *[""] * 6]
    sizes = [f"{row[key] / 1e6:.2f}" for key in ("plain_bytes", "ogc_bytes", "predicted_bytes")]
    counts = [
        str(row["operations"]),
        str(row.get("leaves", 0)),
        f"{row.get('leaf_share', 0):.0%}",
        f"{row['plan_seconds']:.1f}",
    ]
    verdict = row["verdict"] if row["verdict"] == "equal" else f"{row['verdict']}: {row['detail'][:60]}"
    return [row["name"], verdict, *sizes, *counts]


def summary(family: str, rows: list[Row]) -> str:
    """One line: the verdicts, and what else a family is held to."""
    counts = Counter(row["verdict"] for row in rows)
    planned = [row for row in rows if "ogc_bytes" in row]
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    tried = [row for row in rows if row["verdict"] not in ("plain cannot", "plain")]
    share = f"{len(planned) / len(tried):.1%} planned" if tried else "none tried"
    return (
        f"{family}: {len(rows)} models: {said}; {share}; "
        f"{sum(row.get('leaf_share', 0) >= 0.5 for row in planned)} with half of the parameters in one leaf, "
        f"{sum(row['ogc_bytes'] > row['plain_bytes'] for row in planned)} above the plain peak"
    )
