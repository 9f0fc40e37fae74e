"""The demo from preparation to verdict: three arms, one table, report.json, memory.png."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from bwdfuse.demo import claims
from bwdfuse.demo.arms import ARMS, OFF, ON, STOCK, Arm, DemoError, Job
from bwdfuse.demo.cache import write_json
from bwdfuse.demo.evaluate import Judge, largest_difference
from bwdfuse.demo.prepare import Prepared, prepare
from bwdfuse.demo.recipe import RECIPES, Recipe
from bwdfuse.demo.show import Screen

TRAINERS = {"verl": "bwdfuse.demo.verl", "trl": "bwdfuse.demo.trl"}
SAMPLES = 2
NEEDED = ("torch", "transformers", "rich", "tqdm", "matplotlib", "pyarrow", "safetensors")


def run(out: Path, *, trainer: str = "verl", recipe: str = "smollm2", cache: Path | None = None) -> dict[str, Any]:
    """Prepare, train every arm, judge, show; write ``out/report.json`` and ``out/memory.png``.

    Raises:
        DemoError: something is missing, a run failed, or a claim does not hold (the report is written all the same).
    """
    began = time.perf_counter()
    chosen, module = _choices(trainer, recipe)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    screen = Screen()
    prepared = prepare(chosen, cache.resolve() if cache else out.parent / "cache", screen.say)
    device, why = _device()
    screen.say(why)
    trained = module.adapted(chosen) if hasattr(module, "adapted") else chosen
    job = Job(trained, prepared.model, prepared.train_file, device, trained.threads or os.cpu_count() or 1)
    arms = {}
    for name, title in ARMS.items():
        with screen.training(f"{name:>5}: {title}", trained.updates) as progress:
            arms[name] = module.train(name, job, out / "runs" / name, progress)
    report = {"trainer": module.NAME, "device": device, **claims.measure(trained, arms)}
    report |= _judge(chosen, prepared, arms, screen)
    report["machine"] = _machine(job.threads)
    report["versions"] = _versions(module)
    report["seconds_total"] = time.perf_counter() - began
    write_json(out / "report.json", report)
    _plot(arms, report, out / "memory.png")
    for name in (OFF, STOCK):  # judged already; the trained model that stays is that of flag on
        shutil.rmtree(arms[name].weights)
    screen.table(report)
    screen.say(f"wrote {out / 'report.json'}, {out / 'memory.png'} and the trained model {arms[ON].weights}")
    wrong = claims.broken(report, trained)
    if wrong:
        raise DemoError("\n".join(wrong))
    return report


def _choices(trainer: str, recipe: str) -> tuple[Recipe, ModuleType]:
    if trainer not in TRAINERS:
        raise DemoError(f"There is no demo for trainer {trainer!r}; there is one for {', '.join(TRAINERS)}.")
    if recipe not in RECIPES:
        raise DemoError(f"There is no recipe {recipe!r}; there is {', '.join(RECIPES)}.")
    missing = [name for name in (*NEEDED, trainer) if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"The demo needs {', '.join(missing)}; `make demo` installs what it needs into .venv.")
    return RECIPES[recipe], importlib.import_module(TRAINERS[trainer])


def _device() -> tuple[str, str]:
    """CUDA where both torch and this build of bwdfuse can use it."""
    import torch

    from bwdfuse.report import build_info

    if not torch.cuda.is_available():
        return "cpu", "training on the CPU (torch sees no GPU)"
    cuda = build_info()["cuda"]
    if cuda["available"]:
        return "cuda", f"training on {torch.cuda.get_device_name()}"
    return "cpu", f"training on the CPU, although torch sees a GPU: {cuda['reason']}"


def _judge(recipe: Recipe, prepared: Prepared, arms: dict[str, Arm], screen: Screen) -> dict[str, Any]:
    screen.say("comparing weights")
    found: dict[str, Any] = {
        "weights_max_abs_diff": largest_difference(arms[OFF].weights, arms[ON].weights),
        "weights_max_abs_diff_stock": largest_difference(arms[STOCK].weights, arms[ON].weights),
        "weights_moved": largest_difference(prepared.model, arms[ON].weights),
    }
    shown = [pair for pair in prepared.held_out if pair.is_public][:SAMPLES]
    samples = [{"question": pair.question, "reference": pair.answer} for pair in shown]
    folders = {"before": prepared.model, "after": arms[ON].weights, "after_stock": arms[STOCK].weights}
    for when, folder in folders.items():
        screen.say(f"evaluating on {len(prepared.held_out)} held-out questions: {when.replace('_', ', ')}")
        judge = Judge(folder)
        found[f"eval_loss_{when}"] = judge.loss(prepared.held_out, recipe.max_length)
        if when != "after_stock":
            for sample in samples:
                sample[when] = judge.complete(sample["question"])
        del judge
    return found | {"samples": samples}


def _plot(arms: dict[str, Arm], report: dict[str, Any], path: Path) -> None:
    from bwdfuse.memory import compare

    title = f"One update of {report['model']} in {report['trainer']}: the peak falls by {report['saved_mib']:,.0f} MiB"
    compare(arms[OFF].timeline, arms[ON].timeline).plot(path, title=title)


def _machine(threads: int) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a kernel that gives no name
    return {"cpu": cpu, "threads": threads, "system": platform.platform()}


def _versions(trainer: ModuleType) -> dict[str, Any]:
    from bwdfuse.report import build_info

    info = build_info()
    names = ("torch", "transformers", "numpy")
    return {
        "bwdfuse": info["version"],
        "isa": info["isa"]["chosen"],
        "python": platform.python_version(),
        trainer.NAME: trainer.version(),
        **{name: importlib.metadata.version(name) for name in names},
    }
