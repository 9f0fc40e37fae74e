"""One arm of the demo in TRL, in a process of its own: ``python -m bwdfuse.demo.trl_run FOLDER`` with FOLDER/job.json.

The trainer is what a user would write. The callback beside it only watches: it times updates, records a memory timeline
and notes what the optimizer counted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import bwdfuse
from bwdfuse.demo.arms import OFF, ON, STOCK
from bwdfuse.demo.cache import write_json
from bwdfuse.demo.process import METRICS
from bwdfuse.memory import timeline


class Watch(TrainerCallback):
    """Writes metrics.jsonl, timeline.json and probe.json."""

    def __init__(self, folder: Path, recorded_update: int) -> None:
        self.folder = folder
        self.recorded_update = recorded_update
        self.seconds: list[float] = []
        self.began = 0.0
        self.recording: Any = None
        self.stack = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **objects: Any) -> None:
        """An update is recorded or timed but never both: recording slows it down."""
        self.began = time.perf_counter()
        if state.global_step + 1 == self.recorded_update:
            self.recording = self.stack.enter_context(timeline(model, device=next(model.parameters()).device))
            self.stack.enter_context(_marked_backward(self.recording))
            self.recording.mark("forward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.recording is not None:
            self.recording.mark("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Gradients that were left are gone by now, as the trainer calls zero_grad() before it."""
        if self.recording is not None:
            self.stack.close()
            self.recording.save(self.folder / "timeline.json")
            self.recording = None
        elif state.global_step > 1:  # the first one warms up
            self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        if "loss" in logs:
            with (self.folder / METRICS).open("a") as file:
                file.write(json.dumps(logs) + "\n")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **objects: Any) -> None:
        optimizer = objects["optimizer"].optimizer
        params = [param for param in model.parameters() if param.requires_grad]
        sizes = [param.numel() * param.element_size() for param in params]
        doc = {
            "seconds": self.seconds,
            "stats": optimizer.stats() if isinstance(optimizer, bwdfuse.AdamW) else None,
            "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "parameters": len(params),
            "gradient_bytes": sum(sizes),
            "largest_gradient_bytes": max(sizes),
        }
        write_json(self.folder / "probe.json", doc)


@contextlib.contextmanager
def _marked_backward(recording: Any) -> Any:
    """Marks where backward begins, by standing in front of it for one update."""
    backward = torch.Tensor.backward

    @functools.wraps(backward)
    def marked(*args: Any, **kwargs: Any) -> None:
        recording.mark("backward")
        backward(*args, **kwargs)

    torch.Tensor.backward = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


def build(job: dict[str, Any], folder: Path) -> Any:
    """The trainer of one arm. Between flag off and on only the flag differs; stock imports nothing of ours."""
    module: Any = importlib.import_module("trl" if job["arm"] == STOCK else "bwdfuse.trainers.trl")
    flag = {"bwd_hook": True} if job["arm"] == ON else {}
    args = module.SFTConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=job["updates"],
        per_device_train_batch_size=job["batch"],
        max_length=job["max_length"],
        learning_rate=job["lr"],
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        use_cpu=job["device"] == "cpu",
        bf16=False,
        disable_tqdm=True,
        **flag,
    )
    native = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return module.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        args=args,
        train_dataset=_conversations(job["train_file"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Watch(folder, job["recorded_update"])],
        optimizer_cls_and_kwargs=(bwdfuse.AdamW, native) if job["arm"] == OFF else None,
    )


def _conversations(path: str) -> Any:
    import datasets
    import pyarrow.parquet

    return datasets.Dataset.from_list(pyarrow.parquet.read_table(path).to_pylist())


def main(folder: Path) -> None:
    trainer = build(json.loads((folder / "job.json").read_text()), folder)
    trainer.train()
    trainer.save_model(str(folder / "model"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
