"""`shardwise migrate` over directories of other tools' files: what is recognised, what is lost.

    python benchmarks/foreign_configs.py DIRECTORY... [--unknown] [--refused]

Every file that has a suffix of a configuration is read. A file counts as migrated when its YAML
loads as a configuration of ours. A key is unaccounted for when no line of the table is about it.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from shardwise.config.load import load_config
from shardwise.config.trees import read_file
from shardwise.errors import UserError
from shardwise.migrate.migration import Migration, migrate_file
from shardwise.migrate.settle import as_override
from shardwise.migrate.source import Source

SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--unknown", action="store_true", help="list keys that are unknown")
    parser.add_argument("--refused", action="store_true", help="list files that are refused")
    asked = parser.parse_args()
    migrated, refused = [], []
    for file in files_in(asked.directories):
        try:
            done = migrate_file(file, None, [])
            load_config(None, [as_override(path, val) for path, val in done.settings.items()])
            migrated.append((file, done))
        except UserError as error:
            refused.append((file, error.what.splitlines()[0]))
    show(migrated, refused)
    if asked.unknown:
        show_unknown(migrated)
    if asked.refused:
        for file, what in refused:
            print(f"  {file}: {what[-140:]}")


def files_in(directories: list[Path]) -> Iterator[Path]:
    for directory in directories:
        for file in sorted(directory.rglob("*")):
            if file.suffix.lower() in SUFFIXES and file.is_file():
                yield file


def unaccounted(file: Path, done: Migration) -> set[str]:
    """Keys of the file without a line. A section of another tool has its key before each line."""
    told = {line.key for line in done.lines}
    told |= {line.key.replace(": ", ".", 1) for line in done.lines}
    return {leaf.key for leaf in Source(read_file(file).tree).leaves()} - told


def show(migrated: list[tuple[Path, Migration]], refused: list[tuple[Path, str]]) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for file, done in migrated:
        count = counts[done.reader.kind]
        count["files"] += 1
        count["keys"] += sum(line.outcome.fate != "assumed" for line in done.lines)
        count["unknown"] += sum("unknown:" in line.outcome.why for line in done.lines)
        count["without a line"] += len(unaccounted(file, done))
        count.update(line.outcome.fate for line in done.lines)
    columns = ("files", "keys", "mapped", "changed", "dropped", "unknown", "without a line")
    print(f"{'kind':14}" + "".join(f"{name:>16}" for name in columns))
    for kind, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{kind:14}" + "".join(f"{count[name]:16}" for name in columns))
    print(f"{len(refused)} files refused, each with an error that says why")


def show_unknown(migrated: list[tuple[Path, Migration]]) -> None:
    keys = Counter(
        (done.reader.kind, line.key)
        for _, done in migrated
        for line in done.lines
        if "unknown:" in line.outcome.why
    )
    for (kind, key), count in keys.most_common():
        print(f"  {count:4}  {kind:12} {key}")


if __name__ == "__main__":
    main()
