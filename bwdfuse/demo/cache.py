"""Artifacts that are expensive to make: built once, whole or not at all, and checked by checksum before each use.

Knows files and nothing of models or data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MANIFEST = ".manifest.json"


def cached(folder: Path, key: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder, made by ``build`` unless an intact one with the same key is there already.

    ``build`` fills an empty folder beside it, which takes the final name only when complete. A run that was killed
    leaves nothing that a later one could mistake for the result.
    """
    if is_intact(folder, key):
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build(partial)
    files = sorted(path.relative_to(partial) for path in partial.rglob("*") if path.is_file())
    sums = {str(name): sha256(partial / name) for name in files}
    write_json(partial / _MANIFEST, {"key": key, "sha256": sums})
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder


def is_intact(folder: Path, key: dict[str, Any]) -> bool:
    """Whether the folder was built with this key and every byte is still what it was."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["key"] != key or not manifest["sha256"]:
            return False
        return all(sha256(folder / name) == want for name, want in manifest["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, doc: dict[str, Any]) -> None:
    """Write the whole document or leave the old one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(doc, indent=1) + "\n")
    os.replace(partial, path)
