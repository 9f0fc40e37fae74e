"""Turns three finished arms into one report, and holds the report to what the project claims."""

from __future__ import annotations

import math
from typing import Any

from bwdfuse.demo.arms import OFF, ON, STOCK, Arm
from bwdfuse.demo.recipe import Recipe
from bwdfuse.memory import compare

MIB = 1 << 20
SAVED_SHARE = (0.9, 1.02)  # of gradients minus the largest one, the most there is to save


def measure(recipe: Recipe, arms: dict[str, Arm]) -> dict[str, Any]:
    """The figures that the training runs themselves gave."""
    on = arms[ON]
    stats = on.stats or {}
    figures: dict[str, Any] = {
        "recipe": recipe.name,
        "model": recipe.title,
        "updates": recipe.updates,
        "parameters": on.parameters,
        "native_steps": stats.get("native_steps", 0),
        "gradient_mib": on.gradient_bytes / MIB,
        "largest_gradient_mib": on.largest_gradient_bytes / MIB,
        "saved_mib": compare(arms[OFF].timeline, on.timeline).saved_mib,
    }
    for name, arm in arms.items():
        figures |= {
            f"optimizer_{name}": arm.optimizer,
            f"losses_{name}": arm.losses,
            f"seconds_per_step_{name}": arm.seconds_per_step,
            f"peak_mib_{name}": arm.timeline.above_rest_mib,
            f"rest_mib_{name}": arm.timeline.rest_mib,
            f"peak_gradient_mib_{name}": arm.timeline.peak_grad_mib,
        }
    return figures


def broken(report: dict[str, Any], recipe: Recipe) -> list[str]:
    """One sentence for every claim that the report does not bear out."""
    checks = [_weights(report), _losses(report), _memory(report), _native(report), _optimizers(report)]
    if recipe.min_eval_drop is not None:
        checks.append(_learned(report, recipe.min_eval_drop))
    return [sentence for sentence in checks if sentence]


def _weights(report: dict[str, Any]) -> str | None:
    difference, moved = report["weights_max_abs_diff"], report["weights_moved"]
    if difference != 0.0:
        return f"Weights differ by {difference} between flag off and on; they must be equal bit for bit."
    if not moved > 0.0:
        return f"Training moved no weight (largest change {moved}), so equal weights prove nothing."
    return None


def _losses(report: dict[str, Any]) -> str | None:
    for name in (OFF, ON, STOCK):
        losses = report[f"losses_{name}"]
        if len(losses) != report["updates"] or not all(map(math.isfinite, losses)):
            return f"Arm {name} must log {report['updates']} finite losses; it logged {len(losses)}: {losses}"
    if report["losses_off"] != report["losses_on"]:
        return "The losses of flag off and on differ; they must be the same numbers."
    return None


def _memory(report: dict[str, Any]) -> str | None:
    ceiling = report["gradient_mib"] - report["largest_gradient_mib"]
    low, high = (share * ceiling for share in SAVED_SHARE)
    if not low <= report["saved_mib"] <= high:
        return (
            f"The peak fell by {report['saved_mib']:.1f} MiB; it should be {low:.1f} to {high:.1f} "
            f"(gradients minus the largest one: {ceiling:.1f})."
        )
    return None


def _native(report: dict[str, Any]) -> str | None:
    wanted = report["parameters"] * report["updates"]
    if report["native_steps"] != wanted:
        return f"The C kernel counted {report['native_steps']} steps; parameters x updates is {wanted}."
    return None


def _optimizers(report: dict[str, Any]) -> str | None:
    names = {name: report[f"optimizer_{name}"] for name in (OFF, ON, STOCK)}
    ours = [name for name, used in names.items() if used.startswith("bwdfuse.")]
    return None if ours == [OFF, ON] else f"The arms did not run the optimizers they name: {names}"


def _learned(report: dict[str, Any], wanted: float) -> str | None:
    drop = report["eval_loss_before"] - report["eval_loss_after"]
    return None if drop > wanted else f"The evaluation loss fell by {drop:.3f}; more than {wanted} is claimed."
