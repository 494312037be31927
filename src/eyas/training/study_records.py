"""From the logs of a study's variants to one JSONL, one line a validation, and a table.

Only the trainer's logs are read, so it can be made at any time, also while variants run or after a kill.

    variant, group, state     "layers/2", "layers" and running, finished or failed
    step, epochs, tokens      of training so far; tokens with padding
    flops, head_flops         of training so far, with and without the target's forward (training/flops.py)
    seconds                   wall clock, compilation and validations included
    loss                      mean of the last log record
    acceptance                share accepted at each depth, given that it was reached, over all anchors
    visited_acceptance        the same over the anchors that decoding visits
    simulated_al              1 + sum of products of visited_acceptance
    decoded                   data set -> AL and acceptance by depth of real decoding, where asked for
"""

import json
from pathlib import Path
from typing import Any

from eyas.core.errors import DataError
from eyas.data.files import write_bytes

Row = dict[str, Any]


def collect(out: Path) -> list[Row]:
    """Write out/study.jsonl and return its rows, variants in the study's order."""
    about = read_json(out / "study.json")
    rows = [row for name in about["variants"] for row in variant_rows(out, name)]
    write_bytes(out / "study.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def variant_rows(out: Path, name: str) -> list[Row]:
    """Rows of one variant; none if it has not begun."""
    folder = out / name
    if not (folder / "variant.json").exists():
        return []
    about = read_json(folder / "variant.json")
    sums: dict[str, Any] = {"flops": 0.0, "head_flops": 0.0, "tokens": 0, "loss": None}
    rows: list[Row] = []
    for record in _log(folder / "training_log.jsonl"):
        if record["kind"] == "train":
            sums["flops"] += record["flops"]
            sums["head_flops"] += record["head_flops"]
            sums["tokens"], sums["loss"] = record["tokens"], record["loss"]
        elif record["kind"] == "validation":
            measured = ("acceptance", "visited_acceptance", "simulated_al")
            if rows and rows[-1]["step"] == record["step"]:
                rows.pop()  # a leg that begins at the last step validates it again
            rows.append(
                {
                    "variant": name,
                    "group": name.rpartition("/")[0],
                    "state": about["state"],
                    "num_trained_parameters": about["num_trained_parameters"],
                    "step": record["step"],
                    "epochs": round(record["step"] / about["steps_per_epoch"], 4),
                    **sums,
                    "seconds": record["seconds"],
                    **{key: record[key] for key in measured},
                    "decoded": record.get("decoded", {}),
                    "device": about["device"],
                }
            )
        elif record["kind"] == "decoding" and rows:
            rows[-1]["decoded"] = record["result"]
    return rows


def last_rows(rows: list[Row]) -> list[Row]:
    """The newest row of each variant."""
    return list({row["variant"]: row for row in rows}.values())


def table(rows: list[Row], baseline: str | None = None, against: dict[str, str] | None = None) -> str:
    """Markdown: a line for each variant's newest row; AL beside the baseline's, as a difference.

    Groups in `against` are held against the variant named there.
    """
    newest = last_rows(rows)
    if not newest:
        return "Nothing is measured yet.\n"
    base = next((row for row in newest if row["variant"] == baseline), None)
    sets = list(dict.fromkeys(name for row in newest for name in row["decoded"]))
    depths = max(len(row["acceptance"]) for row in newest)
    head = [
        "variant",
        "M trained",
        "steps",
        "epochs",
        "M tokens",
        "PFLOP",
        "of the head",
        "s",
        "AL simulated",
    ]
    head += [f"against {baseline}"] * (base is not None)
    head += [f"AL {name}" for name in sets] + [f"a{depth}" for depth in range(depths)]
    lines = [head, ["---"] * len(head)]
    for row in newest:
        cells = [
            row["variant"] + ("" if row["state"] == "finished" else f" ({row['state']})"),
            f"{row['num_trained_parameters'] / 1e6:.1f}",
            f"{row['step']:,}",
            f"{row['epochs']:.2f}",
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['flops'] / 1e15:.3g}",
            f"{row['head_flops'] / 1e15:.3g}",
            f"{row['seconds']:.0f}",
            f"{row['simulated_al']:.3f}",
        ]
        if base is not None:
            named = (against or {}).get(row["variant"].partition("/")[0])
            other = next((one for one in newest if one["variant"] == named), base)
            difference = f"{row['simulated_al'] - other['simulated_al']:+.3f}"
            cells.append("" if row is base else difference + f" ({named})" * (other is not base))
        for name in sets:
            figures = row["decoded"].get(name)
            cells.append(f"{figures['acceptance_length']:.3f}" if figures else "")
        shares = [f"{share:.3f}" for share in row["acceptance"]]
        lines.append(cells + shares + [""] * (depths - len(shares)))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; DataError naming the file for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; is {path.parent} the folder of a study?") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object")
    return value


def _log(path: Path) -> list[dict[str, Any]]:
    """Records of a trainer's log, without a line that a kill cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
