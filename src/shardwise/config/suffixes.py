"""What a file's name says about its content: the source that reads it, and its compression."""

from __future__ import annotations

# What a directory is searched for; a file that is named outright may have any suffix.
SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
}
# After any of the above but Parquet's, which compresses inside of the file.
COMPRESSED = (".gz", ".zst")


def without_compression(name: str) -> str:
    """`a.jsonl.zst` -> `a.jsonl`."""
    return next((name[: -len(end)] for end in COMPRESSED if name.endswith(end)), name)


def source_of_file(name: str) -> str | None:
    """The source that reads files of this name, or None where the suffix tells nothing."""
    if name.endswith(SUFFIXES["parquet"]):
        return "parquet"
    bare = without_compression(name)
    # Directories are not searched for .json files, which may be anything.
    if bare.endswith((*SUFFIXES["jsonl"], ".json")):
        return "jsonl"
    return "text" if bare.endswith(SUFFIXES["text"]) else None


def has_suffix(name: str, source: str) -> bool:
    """Whether a directory is searched for files of this name."""
    bare = name if source == "parquet" else without_compression(name)
    return bare.endswith(SUFFIXES[source])
