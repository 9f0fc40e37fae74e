"""A real SFT trainer of verl, in which things change after its settings were checked; prints what came of each.

Run with verl's own command line.
"""

import torch
from verl.trainer import sft_trainer
from verl.utils.distributed import initialize_global_process_group

from bwdfuse.errors import BwdFuseError


def run_sft(config):
    initialize_global_process_group()
    trainer = sft_trainer.SFTTrainer(config)
    engine = trainer.engine
    ours = engine.optimizer
    before = {name: param.to_local().clone() for name, param in engine.module.named_parameters()}

    def fit(fault):
        try:
            trainer.fit()
            print(f"{fault}: trained on", flush=True)
        except BwdFuseError as error:
            params = engine.module.named_parameters()
            same = all(torch.equal(param.to_local(), before[name]) for name, param in params if name in before)
            print(f"{fault}: weights unchanged {same}: {type(error).__name__}: {error}", flush=True)

    config.data.micro_batch_size_per_gpu = 2
    fit("micro-batches")
    config.data.micro_batch_size_per_gpu = 8

    engine.optimizer = torch.optim.AdamW(engine.module.parameters())
    fit("replaced optimizer")
    engine.optimizer = ours

    ours.disarm()
    fit("disarmed optimizer")
    ours.arm(engine.module)

    engine.module.extra = torch.nn.Parameter(torch.zeros(1))
    engine.module.extra.grad = torch.ones(1)
    fit("foreign parameter")
    del engine.module.extra

    fit("no fault")


sft_trainer.run_sft = run_sft
if __name__ == "__main__":
    sft_trainer.main()
