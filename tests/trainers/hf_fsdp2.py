"""One rank of a run under FSDP2, for test_transformers_fsdp2.py: ``torchrun ... hf_fsdp2.py FOLDER``.

accelerate shards on accelerators only. Its state is told that these CPU processes are some; all else is its own code.
Rank 0 prints one JSON line with what it found.
"""

import json
import sys

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from hf_runs import hyperparameters, make_model, make_tokens, settings

import bwdfuse
from bwdfuse.trainers.transformers import Trainer, TrainingArguments, callback, find_optimizer


def run(how, folder, resume=None, **changes):
    """Trains 6 updates; how: on, off or callback."""
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    sharded["fsdp_config"]["state_dict_type"] = "SHARDED_STATE_DICT"
    arguments = transformers.TrainingArguments if how == "callback" else TrainingArguments
    flag = {} if how == "callback" else {"bwd_hook": how == "on"}
    args = arguments(**settings(folder, ddp_backend="gloo", max_steps=6, **sharded, **flag, **changes))
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    options = {"train_dataset": make_tokens(), "optimizer_cls_and_kwargs": (bwdfuse.AdamW, hyperparameters(args))}
    if how == "callback":
        trainer = transformers.Trainer(make_model(), args, callbacks=[callback()], train_dataset=make_tokens())
    else:
        trainer = Trainer(make_model(), args, **options)
    trainer.train(resume_from_checkpoint=resume)
    params = dict(trainer.model.named_parameters())
    assert all(isinstance(param, torch.distributed.tensor.DTensor) for param in params.values())
    optimizer, _ = find_optimizer(trainer.optimizer)
    assert isinstance(optimizer, bwdfuse.AdamW) and not optimizer.armed
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    tensors = {name: param.full_tensor() for name, param in params.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        tensors |= {f"{name}.{key}": optimizer.state[param][key].full_tensor() for name, param in params.items()}
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
        "tensors": tensors,
        "native_steps": optimizer.stats()["native_steps"],
        "params": len(params),
        "rank": args.process_index,
    }


def same(a, b):
    return all(torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"])


def main(folder):
    torch.set_num_threads(1)
    saving = {"save_strategy": "steps", "save_steps": 3}
    runs = {how: run(how, f"{folder}/{how}", **saving) for how in ("off", "on", "callback")}
    off = runs["off"]
    found = {
        "losses": {how: runs[how]["losses"] == off["losses"] for how in runs},
        "tensors": {how: same(runs[how], off) for how in runs},
        "norms": {how: runs[how]["norms"] for how in runs},
        "native_steps": runs["on"]["native_steps"],
        "params": off["params"],
        "resumed": {},
    }
    for first, second in [("on", "on"), ("off", "on"), ("on", "off"), ("on", "callback"), ("callback", "on")]:
        resumed = run(second, f"{folder}/{first}-{second}", resume=f"{folder}/{first}/checkpoint-3")
        found["resumed"][f"{first} {second}"] = same(resumed, off)
    if off["rank"] == 0:
        print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
