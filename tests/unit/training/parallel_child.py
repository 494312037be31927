"""What torchrun starts in test_parallel.py: runs of the tests' recipe one after another, on as many ranks as
there are. Starting costs more than the runs do.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from test_trainer import recipe

from eyas.data.store import TokenStore
from eyas.training.config import HeadSection
from eyas.training.parallel import World
from eyas.training.trainer import Trainer
from tiny import tiny_target


def configure(out, kind, base=None, **run):
    """Everything on that a rank could get wrong: moving average, sharded target, trained table.

    With the folder of a head as `base`, a correction alone on top of it.
    """
    config = recipe(out, kind, max_steps=8, log_every=1, checkpoint_every=3, shard_target=True, **run)
    head = replace(config.head, train_embeddings="all")
    if base is not None:
        head = HeadSection(warm_start=str(base), train="markov", markov_rank=8, markov_form="hidden")
    optim = replace(config.optim, ema=0.9)
    return replace(config, head=head, optim=optim)


def train(world, store, out, kind, stop_at=None, **options):
    """A run, or the beginning of one: at `stop_at` steps this process kills itself."""
    config = configure(out, kind, **options)
    target = tiny_target()
    target.decoder.to(world.device)
    config = replace(config, run=replace(config.run, precision="float32"))
    trainer = Trainer(config, target, store, world=world)
    run_step = trainer.step.run

    def run_or_die(*args, **kwargs):
        if trainer.state.step == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_step(*args, **kwargs)

    trainer.step.run = run_or_die
    trainer.train()


if __name__ == "__main__":
    world = World.join(sys.argv[1])
    store = TokenStore.load(Path(sys.argv[2]))
    for job in json.loads(sys.argv[3]):
        train(world, store, **job)
        # The next one may read what this one's first rank is still writing.
        torch.distributed.barrier()
    world.leave()
