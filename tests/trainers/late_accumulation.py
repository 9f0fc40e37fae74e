"""A real SFT trainer of verl whose micro-batch size changes after its settings were checked; prints what came of it.

Run with verl's own command line. The weights must be those from before the update that was refused.
"""

import torch
from verl.trainer import sft_trainer
from verl.utils.distributed import initialize_global_process_group

from bwdfuse.errors import AccumulationError


def run_sft(config):
    initialize_global_process_group()
    trainer = sft_trainer.SFTTrainer(config)
    config.data.micro_batch_size_per_gpu = 2
    before = {name: param.to_local().clone() for name, param in trainer.engine.module.named_parameters()}
    try:
        trainer.fit()
    except AccumulationError as error:
        after = trainer.engine.module.named_parameters()
        unchanged = all(torch.equal(param.to_local(), before[name]) for name, param in after)
        print(f"weights unchanged: {unchanged}; {error}", flush=True)
        raise


sft_trainer.run_sft = run_sft
if __name__ == "__main__":
    sft_trainer.main()
