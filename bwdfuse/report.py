"""What this installation can do and why not more. Reads facts from the other rooms; decides nothing; never raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from bwdfuse import _native
from bwdfuse._version import __version__

TRAINERS = ("verl", "trl", "transformers")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def build_info() -> dict[str, Any]:
    """Version, native part, instruction sets, threads, CUDA, torch, tensor exchange, trainers; what is absent with its reason.

    Never raises: without torch, without the native part or with a broken installation of either it says so.
    """
    torch, torch_info = _torch()
    native, isa, cuda = _native_part()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "native": native,
        "isa": isa,
        "threads": _threads(),
        "cuda": cuda,
        "torch": torch_info,
        "exchange": _exchange(torch),
        "trainers": {name: _trainer(name) for name in TRAINERS},
        "hints": _hints(torch is not None),
    }


def show() -> None:
    """Print `build_info` as a table: with rich where it is installed, else as plain lines."""
    info = build_info()
    lines = _lines(info)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(label) for label, _ in lines)
        for label, text in lines:
            print(f"{label:<{width}}  {text}")
        for hint in info["hints"]:
            print(f"hint: {hint}")
        return
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in lines:
        table.add_row(label, _plain(text))
    console.print(table)
    for hint in info["hints"]:
        console.print(_plain(f"hint: {hint}"), style="yellow")


def _plain(text: str) -> Any:
    """Text that rich must not read as markup: reasons carry brackets."""
    from rich.text import Text

    return Text(text)


def _lines(info: dict[str, Any]) -> list[tuple[str, str]]:
    native, isa, torch = info["native"], info["isa"], info["torch"]
    chosen = f"{isa['chosen']} (possible here: {', '.join(isa['possible'])})" if isa["chosen"] else isa["reason"]
    lines = [
        ("bwdfuse", f"{info['version']} on Python {info['python']}"),
        ("native part", f"{native['compiler']}, {native['flags']}" if native["available"] else native["reason"]),
        ("instruction set", chosen + (f", forced by BWDFUSE_ISA={isa['forced']}" if isa["forced"] else "")),
        ("threads", info["threads"]["how"]),
        ("CUDA", "available" if info["cuda"]["available"] else info["cuda"]["reason"]),
        ("torch", torch["version"] if torch["available"] else torch["reason"]),
        ("tensor exchange", info["exchange"]["how"]),
    ]
    for name, trainer in info["trainers"].items():
        lines.append((name, f"{trainer['version'] or 'not installed'}; {trainer['flag']}"))
    return lines


def _torch() -> tuple[Any, dict[str, Any]]:
    try:
        import torch
    except Exception as error:  # a broken installation raises OSError, RuntimeError and worse
        return None, {"available": False, "version": None, "reason": _reason("torch cannot be imported", error)}
    return torch, {"available": True, "version": str(torch.__version__), "reason": None}


def _native_part() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    forced = os.environ.get("BWDFUSE_ISA")
    extension = _native.extension
    if extension is None:
        why = f"the native part could not be loaded: {_native.reason}"
        return (
            {"available": False, "reason": why, "compiler": None, "flags": None},
            {"chosen": None, "possible": (), "built": (), "forced": forced, "reason": why},
            {"available": False, "reason": why},
        )
    built = extension.build_info()
    return (
        {"available": True, "reason": None, "compiler": built["compiler"], "flags": built["flags"]},
        {**extension.isa_info(), "forced": forced, "reason": None},
        {"available": False, "reason": built["cuda"]},
    )


def _threads() -> dict[str, Any]:
    if _native.extension is None:
        return {"count": None, "how": "unknown: the native part is missing"}
    count = _native.extension.get_num_threads()
    return {"count": count, "how": f"up to {count} for a step on CPU (bwdfuse.set_num_threads)"}


def _exchange(torch: Any) -> dict[str, Any]:
    """How the hook reads tensors, asked of a real plan rather than guessed from version numbers."""
    if torch is None or _native.extension is None:
        missing = "torch" if torch is None else "the native part"
        return {"table": None, "how": f"unknown: {missing} is missing"}
    try:
        from bwdfuse.optim import AdamW

        table = AdamW([torch.nn.Parameter(torch.zeros(1))])._plan.exchange
    except Exception as error:
        return {"table": None, "how": _reason("unknown", error)}
    if table:
        return {"table": True, "how": "torch's DLPack exchange table"}
    return {
        "table": False,
        "how": "attribute calls, slower: this torch has no DLPack exchange table (torch >= 2.10 has)",
    }


def _version(package: str) -> str | None:
    """None where the package is absent, or lies on the path without metadata (a source tree, a vendored copy)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _trainer(name: str) -> dict[str, Any]:
    version = _version(name)
    adapter = importlib.util.find_spec("bwdfuse.trainers") is not None
    adapter = adapter and importlib.util.find_spec(f"bwdfuse.trainers.{name}") is not None
    flag = "no adapter in this version: use bwdfuse.AdamW in a loop of your own"
    if adapter:
        flag = "bwd_hook is there" if version else "bwd_hook will be there once it is installed"
        if name == "verl" and not importlib.metadata.entry_points(group="verl.plugins", name="bwdfuse"):
            flag = "it will not find optim.bwd_hook: bwdfuse is on the path but not installed (pip install bwdfuse)"
    return {"version": version, "adapter": adapter, "flag": flag}


def _hints(has_torch: bool) -> list[str]:
    hints = []
    trl = importlib.util.find_spec("trl") if importlib.util.find_spec("verl") else None
    if trl is not None and trl.submodule_search_locations:
        value_head = Path(trl.submodule_search_locations[0]) / "experimental" / "ppo"
        if not value_head.exists():
            hints.append(
                f"verl does not start beside trl {_version('trl') or '(of unknown version)'}, which has lost a class "
                "that verl imports; keep them in separate environments"
            )
    if has_torch and os.environ.get("THP_MEM_ALLOC_ENABLE") != "1" and _huge_pages_allowed():
        hints.append(
            "THP_MEM_ALLOC_ENABLE=1, set before torch is imported, gives CPU tensors 2 MiB pages; large updates take "
            "about a sixth less time"
        )
    return hints


def _huge_pages_allowed() -> bool:
    try:
        return "[never]" not in HUGE_PAGES.read_text()
    except OSError:
        return False


def _reason(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {error}"
