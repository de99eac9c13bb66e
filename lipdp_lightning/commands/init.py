"""Implements ``lipdp init``: writes a schema and a configuration for a table, to be filled in by its owner."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..report.atomic import write_all_atomically
from ..report.show import show

_BINARY = "{class_path: lipdp_lightning.bounds.losses.BinaryCrossEntropy, init_args: {temperature: 0.1}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", help="a .csv (or .csv.gz) or .parquet file; only the names of its columns are read")
    add("--label", metavar="COLUMN", help="column that is to be predicted")
    add("--group", metavar="COLUMN", help="column that names whose row it is, such as the patient")
    add("--max-rows", type=int, metavar="N", help="rows of one group that may count")
    add("--rows", type=int, metavar="N", help="announced number of rows, or of groups with --group")
    add("--names", metavar="A,B,...", help="names of the columns of a file without a header line")
    add("--delimiter", metavar="C", help="character between fields (default: the one that the header line has)")
    add("--encoding", default="utf-8", help="encoding of the file (default utf-8)")
    add(
        "--public-sample",
        metavar="FILE",
        help="table with the same columns and PUBLIC rows, from which ranges and categories are suggested",
    )
    add("--output", metavar="FILE", help="configuration to write (default: the table's name with .yaml)")


def run(args: argparse.Namespace) -> int:
    import yaml

    from ..data_modules.declaration import Declaration
    from ..data_modules.headers import table_header
    from ..data_modules.placeholders import unfilled

    table, config = Path(args.table), Path(args.output or f"{_stem(Path(args.table))}.yaml")
    schema = config.with_name(f"{config.stem}.schema.yaml")
    given = None if args.names is None else [name.strip() for name in args.names.split(",")]
    header = table_header(table, given, args.delimiter, args.encoding)
    _check(args, header.names, [config, schema], table)
    options = {"label": args.label, "group": args.group, "max_rows": args.max_rows}
    if args.public_sample is None:
        declaration = Declaration.of_columns(header.names, **options)
    else:
        declaration = Declaration.from_public(args.public_sample, **options)
        declaration = _of_these_columns(declaration, header.names)
    entries: dict[str, Any] = {} if args.rows is None else {"rows": args.rows}
    entries |= {} if given is None else {"names": header.names}
    entries |= {} if header.delimiter == "," else {"delimiter": header.delimiter}
    entries |= {} if args.encoding == "utf-8" else {"encoding": args.encoding}
    declaration = declaration.declare(**entries)
    text = configuration(table, schema, config, declaration.content.get("label"), args.rows, args.group or "row")
    left = len(declaration.missing()) + len(unfilled(yaml.safe_load(text), str(config)))
    write_all_atomically(config.parent, {schema.name: declaration.text(), config.name: text})
    show(
        f"{schema}: what is public about the columns of {table.name}, of which only the names were read\n"
        f"{config}: the configuration of a first run\n"
        f"{left} entries are to be filled in; then: lipdp fit --config {config}\n"
    )
    return 0


def _stem(path: Path) -> str:
    return path.name.partition(".")[0] or "table"


def _check(args: argparse.Namespace, names: list[str], targets: list[Path], table: Path) -> None:
    """Refuses, all at once, what would be half-written or would read private rows."""
    problems = []
    for option, column in (("--label", args.label), ("--group", args.group)):
        if column is not None and column not in names:
            problems.append(
                f"{option} {column!r} is not a column of {table}. HINT: use one of {', '.join(names)[:200]}"
            )
    problems += [f"{target} exists already. HINT: use --output another.yaml" for target in targets if target.exists()]
    if args.max_rows is not None and (args.group is None or args.max_rows < 1):
        problems.append("--max-rows needs --group and a positive number. HINT: use --group patient --max-rows 3")
    if args.rows is not None and args.rows < 1:
        problems.append(
            f"--rows {args.rows} is not positive. HINT: give the number in the study's protocol, such as --rows 2000"
        )
    sample = None if args.public_sample is None else Path(args.public_sample)
    if sample is not None and not sample.is_file():
        problems.append(f"--public-sample {sample} is not a file. HINT: check the path")
    elif sample is not None and sample.samefile(table):
        problems.append(
            f"--public-sample {sample} is the private table itself: ranges and categories that are read from private "
            "rows tell of them. HINT: give a sample that was published, or rows that you make up"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _of_these_columns(declaration: Any, names: list[str]) -> Any:
    """Returns the suggestions for the columns of the table; a column without one is left to fill in."""
    from ..data_modules.placeholders import FILL_IN

    found = {entry["name"]: entry for entry in declaration.content["columns"]}
    label, group = (declaration.content.get(key) for key in ("label", "group"))
    others = [entry.get(key) for entry, key in ((label, "name"), (group, "column")) if isinstance(entry, dict)]
    columns = [found.get(name, {"name": name, "kind": FILL_IN}) for name in names if name not in others]
    return type(declaration)({**declaration.content, "columns": columns}, declaration.origin, declaration.notes)


def _loss(label: Any) -> str:
    from ..data_modules.placeholders import FILL_IN

    if not isinstance(label, dict):
        return FILL_IN
    if isinstance(label.get("values"), list):
        return _BINARY if len(label["values"]) == 2 else "cross_entropy"
    return "huber" if "low" in label else FILL_IN


def configuration(table: Path, schema: Path, config: Path, label: Any, rows: int | None, unit: str = "row") -> str:
    """Returns a commented configuration of a linear model on the table; `unit` is what is protected, in words."""
    from ..data_modules.declaration import flow
    from ..data_modules.placeholders import FILL_IN

    return f"""\
# A first private run on {flow(table.name)}. Replace every {FILL_IN}, here and in {flow(schema.name)};
# training is refused before. Then: lipdp fit --config {config}
model:
  # a linear model, the best start where epsilon is small; null takes the shapes that follow from the schema
  network: {{class_path: lipdp_lightning.models.MLP, init_args: {{input_shape: null, outputs: null, zero_init: true}}}}
  # two classes: {_BINARY}
  # more classes: cross_entropy; a number: huber
  loss: {_loss(label)}

data:
  class_path: lipdp_lightning.data_modules.CSVTable
  init_args: {{path: {flow(str(table))}, schema: {flow(str(schema))}}}

privacy:
  # how much may be learnt about one {unit}: 1 is strong, 3 common, 8 weak
  epsilon: {FILL_IN}
  # the probability that this fails: far below 1 / {unit}s
  delta: {FILL_IN}
  # expected passes over the {unit}s, and expected {unit}s of a step: about a tenth of all is a good start
  epochs: 20
  batch_size: {FILL_IN if rows is None else max(1, rows // 10)}
  max_norm: null
"""
