"""Training data without a download: the docstrings of the standard library of the Python that runs this.

A question is a qualified name with its signature, the answer is the first paragraph of its docstring. Training and
evaluation are split by top-level module, and no answer is in both.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 6
ANSWER_CHARS = range(15, 401)
SIGNATURE_CHARS = 200
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "ensurepip"}


Message = dict[str, str]


class Pair(NamedTuple):
    module: str
    question: str
    answer: str

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]

    @property
    def is_public(self) -> bool:
        """Whether nothing in its qualified name is private."""
        name = self.question.split("(")[0].split()[-1]
        return not any(part.startswith("_") for part in name.split("."))


def standard_library_pairs(root: Path | None = None) -> list[Pair]:
    """Every documented class and function below ``root`` (default: the standard library), in file order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found: dict[tuple[str, str], Pair] = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if SKIPPED.isdisjoint(inside.parts):
            for pair in _pairs_of(path, ".".join(inside.with_suffix("").parts).removesuffix(".__init__")):
                found.setdefault((pair.question, pair.answer), pair)
    return list(found.values())


def split(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Training and evaluation pairs, each in an order that depends on nothing but its contents."""
    train = [pair for pair in pairs if not _held_out(pair)]
    answers = {pair.answer for pair in train}
    held = [pair for pair in pairs if _held_out(pair) and pair.answer not in answers]
    return sorted(train, key=_digest), sorted(held, key=_digest)


def pack(pairs: list[Pair], fits: Callable[[list[Message]], bool], wanted: int) -> list[list[Message]]:
    """Conversations of several questions, each as long as fits; questions too long on their own are passed over."""
    packed: list[list[Message]] = []
    current: list[Message] = []
    for pair in pairs:
        if fits(current + pair.messages):
            current = current + pair.messages
            continue
        if current:
            packed.append(current)
        if len(packed) == wanted:
            return packed
        current = pair.messages if fits(pair.messages) else []
    raise ValueError(f"the data fills {len(packed)} conversations, {wanted} are wanted")


def write_parquet(path: Path, conversations: list[list[Message]]) -> None:
    """One conversation a row, in the column that chat trainers read."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"messages": conversations}), path)


def _pairs_of(path: Path, module: str) -> Iterator[Pair]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # the standard library keeps a few broken files on purpose
        return
    yield from _walk(tree, module, module)


def _walk(node: ast.AST, prefix: str, module: str) -> Iterator[Pair]:
    for child in getattr(node, "body", []):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{child.name}"
        if isinstance(child, ast.ClassDef):
            signature = f"class {name}({', '.join(map(ast.unparse, child.bases))})"
        else:
            signature = f"def {name}({ast.unparse(child.args)})"
        answer = _first_paragraph(ast.get_docstring(child) or "")
        if len(answer) in ANSWER_CHARS and len(signature) <= SIGNATURE_CHARS:
            yield Pair(module, f"What does this do in Python?\n{signature}", answer)
        yield from _walk(child, name, module)


def _first_paragraph(docstring: str) -> str:
    return " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())


def _held_out(pair: Pair) -> bool:
    top = pair.module.split(".")[0]
    return int.from_bytes(hashlib.sha256(top.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def _digest(pair: Pair) -> bytes:
    return hashlib.sha256(f"{pair.question}\n{pair.answer}".encode()).digest()
